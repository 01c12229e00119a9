"""Arguments that a captured graph is tried on: ordinary ones of several lengths, and rows of odd values."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ...custom_ops.linear_blocks.runs import level

NUM_TOKENS, FEW, MANY = 7, 1, 67
LARGE = 1e12  # its square, and a product of three, are no infinity in float32
SHIFT = 64  # numbers between where two weights begin in memory they share: kernels want 16 bytes aligned


def sample_arguments(
    module: fx.GraphModule, device: torch.device, num_tokens: int = NUM_TOKENS, *, seed: int = 0
) -> list[Any]:
    """Random arguments for a graph, scaled so that nothing overflows; the same at every call.

    Weights lie over each other in memory, each from another place on, so that a model of any depth takes no
    more than its largest.
    """
    nodes = module.graph.find_nodes(op="placeholder")
    examples = [node.meta["example_value"] for node in nodes]
    tensors = [example for example in examples if isinstance(example, Tensor)]
    tables = [int(tensor.shape[0]) for tensor in tensors if _is_weight(tensor)]
    sampler = _Sampler(device, num_tokens, min(tables, default=num_tokens), seed)
    return [
        sampler.sample(example) if (kind := _kind_of_blocks(node)) is None else sampler.blocks(example, kind)
        for node, example in zip(nodes, examples, strict=True)
    ]


def all_samples(module: fx.GraphModule, device: torch.device) -> Iterator[list[Any]]:
    """What a piece must be right on: several tokens, one, many, and rows of odd values."""
    for num_tokens in (NUM_TOKENS, FEW, MANY):
        yield sample_arguments(module, device, num_tokens)
    yield odd_arguments(module, device)


def odd_arguments(module: fx.GraphModule, device: torch.device) -> list[Any]:
    """Arguments whose rows hold zeros of both signs, large and small numbers, and an infinity."""
    arguments = sample_arguments(module, device, seed=1)
    examples = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
    for example, value in zip(examples, arguments, strict=True):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim and not _is_weight(example):
            _make_odd(value)
    return arguments


def _make_odd(value: Tensor) -> None:
    """The tensor with odd values in each row but the first, in place."""
    large = min(LARGE, torch.finfo(value.dtype).max ** 0.5)
    value[1].copysign_(value[0]).mul_(0)
    value[2].mul_(large)
    value[3].div_(large)
    value[4].view(-1)[0] = float("inf")
    value[5].view(-1)[-1] = float("-inf")


def _is_weight(example: Tensor) -> bool:
    """Whether a tensor has the same size for any number of tokens."""
    return example.ndim > 0 and isinstance(example.shape[0], int)


def _kind_of_blocks(node: fx.Node) -> str | None:
    """The kind of GGUF's blocks that the graph takes a weight for; None for other tensors."""
    for user in node.users:
        if user.target is torch.ops.lamina.linear_blocks.default and user.args[1] is node:
            return str(user.args[3])
    return None


class _Sampler:
    """Random tensors of the shapes of a graph's placeholders."""

    def __init__(self, device: torch.device, num_tokens: int, num_rows: int, seed: int) -> None:
        self._device, self._num_tokens, self._num_rows = device, num_tokens, num_rows
        self._generator = torch.Generator(device).manual_seed(seed)
        self._pools: dict[Any, Tensor] = {}
        self._num_weights = 0

    def sample(self, example: Any) -> Any:
        """A value like the example, the number of tokens for a size."""
        if not isinstance(example, Tensor):
            return self._num_tokens
        shape = [size if isinstance(size, int) else self._num_tokens for size in example.shape]
        if _is_weight(example) and example.is_floating_point():
            return self._weight(shape, example.dtype)
        if example.dtype == torch.bool:
            return torch.rand(shape, generator=self._generator, device=self._device) < 0.5
        if example.is_floating_point():
            return self._normal(shape).to(example.dtype)
        low, high = (-3, 4) if example.dtype == torch.int8 else (0, self._num_rows)
        high = min(high, torch.iinfo(example.dtype).max)
        return torch.randint(
            low, high, shape, generator=self._generator, dtype=example.dtype, device=self._device
        )

    def blocks(self, example: Tensor, kind: str) -> Tensor:
        """Any numbers in blocks of that kind, by scales that are alike: large ones would hide the rest."""
        drawn = torch.randint(
            0, 256, example.shape, generator=self._generator, dtype=example.dtype, device=self._device
        )
        level(drawn, kind)
        return drawn

    def _weight(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        """Values of a norm's weight are about 1, of a projection's scaled by its width."""
        size = torch.Size(shape).numel()
        key = (dtype, len(shape) == 1, shape[-1] if len(shape) > 1 else 0)
        start = SHIFT * self._num_weights % 4096
        self._num_weights += 1
        pool = self._pools.get(key)
        if pool is None or pool.numel() < start + size:
            values = self._normal([4096 + size])
            values = 1 + 0.1 * values if len(shape) == 1 else values.div_(shape[-1] ** 0.5)
            pool = self._pools[key] = values.to(dtype)
        return pool[start : start + size].view(shape)

    def _normal(self, shape: list[int]) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device)
