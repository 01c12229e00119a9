"""A captured graph run op by op: as it is written or in float64, with attention in its place."""

from typing import Any

import torch
from torch import Tensor, fx

from ...custom_ops.paged_attention.reference import dense_attention
from ...custom_ops.rotary_embedding.reference import rotary_embedding
from ..capture.functionalize import is_attention
from ..torch_internals import torch_compat

NARROW = (torch.float16, torch.bfloat16, torch.float32)
SCALED_LINEARS = ("lamina::linear_int8", "lamina::linear_w8a8")  # whose third argument, scales, is float32
# That quantize activations: of two that differ by their last bit, one may be rounded up and the other down.
QUANTIZING = ("lamina::linear_blocks", "lamina::linear_w8a8")
LOOKUPS = ("embedding", "index_select", "getitem")  # exact in any dtype: a large table need not be widened


class OpByOp(fx.Interpreter):
    """Runs a captured graph; memory that it asks for is filled, since contents nobody wrote mean nothing.

    Attention sees a whole sequence, scaled a little otherwise in each layer, so that no two can be swapped.
    """

    def __init__(self, module: fx.GraphModule, fill: float = 0.0) -> None:
        super().__init__(module)
        self._fill = fill

    def run_node(self, node: fx.Node) -> Any:
        """One node; what makes memory fills it."""
        if is_attention(node):
            return _attend(*self.fetch_args_kwargs_from_env(node)[0])
        result = super().run_node(node)
        return result.fill_(self._fill) if makes_memory(node) else result


class Wide(OpByOp):
    """Runs a captured graph in float64, whatever dtypes it names."""

    def run_node(self, node: fx.Node) -> Any:
        """One node in float64; indices and tables of a lookup are widened after it."""
        self._kept = range(len(node.args)) if _short_name(node) in LOOKUPS else range(0)
        if torch_compat.op_name(node.target) in SCALED_LINEARS:
            self._kept = range(2, 3)
        return super().run_node(node)

    def fetch_args_kwargs_from_env(self, node: fx.Node) -> Any:
        """The node's arguments, tensors and dtypes widened."""
        args, kwargs = super().fetch_args_kwargs_from_env(node)
        widened = fx.node.map_aggregate((args, kwargs), _widened)
        kept = [args[index] if index in self._kept else value for index, value in enumerate(widened[0])]
        return tuple(kept), widened[1]

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A method; those that name a dtype give float64."""
        narrowing = target in ("float", "half", "bfloat16")
        return super().call_method("double" if narrowing else target, args, kwargs)


def quantizes_activations(module: fx.GraphModule) -> bool:
    """Whether a graph has such a call."""
    return any(torch_compat.op_name(node.target) in QUANTIZING for node in module.graph.nodes)


def makes_memory(node: fx.Node) -> bool:
    """Whether a node asks for memory without saying what it holds."""
    return node.op in ("call_function", "call_method") and "empty" in _short_name(node)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int, cos: Any = None, sin: Any = None
) -> None:
    if cos is not None:
        q, k = rotary_embedding(q, k, cos, sin)
    out.copy_(dense_attention(q, k, v, (1 + layer / 8) * q.shape[-1] ** -0.5))


def _short_name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in NARROW:
        return value.double()
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value
