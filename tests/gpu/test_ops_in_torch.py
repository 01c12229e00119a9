"""The ops on CUDA tensors as torch sees them: registered rightly, captured into graphs, on any device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina import custom_ops
from lamina.custom_ops._shared import registry

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
HEADS, KV_HEADS, HEAD_DIM, TOKENS = 8, 2, 64, 5


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def heads() -> tuple[Tensor, Tensor, Tensor]:
    qkv = bf16(TOKENS, HEADS + 2 * KV_HEADS, HEAD_DIM)
    return qkv[:, :HEADS], qkv[:, HEADS:-KV_HEADS], qkv[:, -KV_HEADS:]


def angles() -> tuple[Tensor, Tensor]:
    values = torch.rand(TOKENS, HEAD_DIM // 2, device=DEVICE)
    return values.cos(), values.sin()


def caches() -> tuple[Tensor, Tensor]:
    return bf16(4, 16, KV_HEADS, HEAD_DIM), bf16(4, 16, KV_HEADS, HEAD_DIM)


def slots() -> Tensor:
    return int32(3, -1, 20, 63, 0)


def attention() -> tuple[Any, ...]:
    query = bf16(TOKENS, HEADS, HEAD_DIM)
    tables = int32(1, 3, 2, 0).view(2, 2)
    limits = (3, HEAD_DIM**-0.5, -1, -1, 0.0)
    return torch.zeros_like(query), query, *caches(), tables, int32(20, 9), int32(0, 2, 5), *limits


ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "add_rms_norm": lambda: (bf16(TOKENS, 512), bf16(TOKENS, 512), bf16(512), 1e-5),
    "add_zero_centred_rms_norm": lambda: (bf16(TOKENS, 512), bf16(TOKENS, 512), bf16(512), 1e-5, True),
    "copy_blocks": lambda: (*caches(), int32(0, 1, 2, 3).view(2, 2)),
    "gelu_and_mul": lambda: (bf16(TOKENS, 512),),
    "lora": lambda: (
        *(bf16(TOKENS, 24), bf16(TOKENS, 512), bf16(2, 2 * 8, 512), bf16(2, 24, 8)),
        *(torch.rand(2, 2, device=DEVICE), int32(0, 1, -1, 0, 1), [16, 8]),
    ),
    "paged_attention": attention,
    "propose_ngram": lambda: (
        int32(*range(12)).view(3, 4),
        int32(1, 2, 2, 0).view(2, 2),
        int32(5, 3),
        int32(4, 9),
        1,
        4,
        torch.zeros(2, 3, dtype=torch.int32, device="cuda"),
    ),
    "qk_norm": lambda: (*heads()[:2], bf16(HEAD_DIM), bf16(HEAD_DIM), 1e-5, False),
    "rms_norm": lambda: (bf16(TOKENS, 512), bf16(512), 1e-5),
    "rotary_and_write_kv_cache": lambda: (*heads(), *angles(), *caches(), slots()),
    "rotary_embedding": lambda: (*heads()[:2], *angles()),
    "silu_and_mul": lambda: (bf16(TOKENS, 512),),
    "write_kv_cache": lambda: (*heads()[1:], *caches(), slots()),
    "zero_centred_rms_norm": lambda: (bf16(TOKENS, 512), bf16(512), 1e-5),
}

every_op = pytest.mark.parametrize("op", ARGUMENTS)
providers = pytest.mark.parametrize("provider", ["cuda", "triton"])


def tensors(*values: Any) -> list[Tensor]:
    """The tensors among values, and in tuples among them."""
    flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    return [value for value in flat if isinstance(value, Tensor)]


def test_every_op_that_both_cuda_and_triton_have_is_here() -> None:
    ops = set(custom_ops.__all__) - {"attention_site"}  # a mark in a graph, which nothing serves
    both = {op for op in ops if {"cuda", "triton"} <= set(registry.providers(op))}
    apart = {"linear", "linear_w4a16", "quantize_rows", "sample", "scaled_linear"}  # have files of their own
    assert both - apart == set(ARGUMENTS)


@every_op
def test_opcheck(op: str) -> None:
    torch.library.opcheck(getattr(torch.ops.lamina, op).default, ARGUMENTS[op]())


@every_op
def test_auto_takes_the_first_provider_that_runs(op: str) -> None:
    selected = registry.select(op, device=DEVICE, dtype=torch.bfloat16)
    assert selected.name == "cuda" or selected.reason.startswith("cuda"), selected.reason


@providers
@every_op
def test_a_replayed_graph_computes_on_what_its_inputs_hold_then(op: str, provider: str) -> None:
    call = registry.select(op, device=DEVICE, dtype=torch.bfloat16, provider=provider).call
    static = ARGUMENTS[op]()
    call(*static)  # builds what must be built, outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(*static)
    for _ in range(3):
        fresh = ARGUMENTS[op]()
        for ours, theirs in zip(tensors(*static), tensors(*fresh), strict=True):
            if theirs.is_floating_point():
                ours.copy_(theirs)
        graph.replay()
        expected = call(*fresh)
        for ours, theirs in zip(tensors(results, *static), tensors(expected, *fresh), strict=True):
            assert torch.equal(ours, theirs)


@providers
@every_op
def test_a_call_follows_the_current_stream(op: str, provider: str) -> None:
    call = registry.select(op, device=DEVICE, dtype=torch.bfloat16, provider=provider).call
    arguments = ARGUMENTS[op]()
    copies = tuple(value.clone() if isinstance(value, Tensor) else value for value in arguments)
    expected = tensors(call(*copies), *copies)
    inputs = [value for value in tensors(*arguments) if value.is_floating_point()]
    held = [value.clone() for value in inputs]
    for value in inputs:
        value.zero_()
    stream, busy = torch.cuda.Stream(), torch.empty(1 << 26, device=DEVICE)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):  # so that the inputs come late, though on the same stream
            busy.normal_()
        for value, content in zip(inputs, held, strict=True):
            value.copy_(content)
        results = tensors(call(*arguments), *arguments)
    stream.synchronize()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@providers
@every_op
def test_tensors_of_another_device_are_computed_there(op: str, provider: str) -> None:
    call = registry.select(op, device=DEVICE, dtype=torch.bfloat16, provider=provider).call
    arguments = ARGUMENTS[op]()
    moved = tuple(value.to("cuda:1") if isinstance(value, Tensor) else value for value in arguments)
    results, expected = tensors(call(*moved), *moved), tensors(call(*arguments), *arguments)
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.device == torch.device("cuda:1")
        assert torch.equal(ours.cpu(), theirs.cpu())
