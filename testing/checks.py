"""What must hold of a pass and the graph it was given; one function a claim."""

from typing import Any

import torch
from torch import Tensor, fx

from ..compiler.capture.fingerprint import canonical_text
from ..compiler.passes import lower
from ..compiler.passes.graph import Pass, PassReport, is_mutating
from ..custom_ops._shared.quantized import group_of
from ..custom_ops.act_and_mul_quantized.reference import act_and_mul_quantized
from ..custom_ops.add_rms_norm_linear.reference import add_rms_norm_linear
from ..custom_ops.add_rms_norm_quantized.reference import add_rms_norm_quantized
from ..custom_ops.all_reduce_add_rms_norm.reference import all_reduce_add_rms_norm
from ..custom_ops.linear.reference import linear
from ..custom_ops.linear_lora.reference import linear_lora
from ..custom_ops.linear_silu_and_mul.reference import linear_silu_and_mul
from ..custom_ops.lora.reference import lora
from ..custom_ops.qk_norm.reference import qk_norm
from ..custom_ops.rms_norm_quantized.reference import rms_norm_quantized
from ..custom_ops.silu_and_mul.reference import silu_and_mul
from .random_programs import Formulas, Traced, results_of, run

OPS = torch.ops.lamina
# Their kernels have exponentials, or an order of sums, of their own.
OWN_DIGITS = {
    *(OPS.silu_and_mul.default, OPS.gelu_and_mul.default),
    *(OPS.linear.default, OPS.add_rms_norm_linear.default, OPS.act_and_mul_quantized.default),
    *(OPS.linear_w4a16.default, OPS.mlp_w8a8.default, OPS.linear_silu_and_mul.default),
}
GEMMS: Formulas = {
    OPS.linear.default: linear,
    OPS.linear_silu_and_mul.default: linear_silu_and_mul,
    OPS.linear_lora.default: linear_lora,
    OPS.add_rms_norm_linear.default: add_rms_norm_linear,
}
QUANTIZING: Formulas = {
    OPS.add_rms_norm_quantized.default: add_rms_norm_quantized,
    OPS.rms_norm_quantized.default: rms_norm_quantized,
    OPS.act_and_mul_quantized.default: act_and_mul_quantized,
}


def linear_w4a16(*args: Any) -> Tensor:
    """The op with its gate as a formula: the GEMM itself is the same op in every graph."""
    *given, gated = (*args, False, False)[:8]
    out: Tensor = OPS.linear_w4a16.default(*given)
    return silu_and_mul(out) if gated else out


def mlp_w8a8(*args: Any) -> Tensor:
    """The op with its gate as a formula between GEMMs that are the same op in every graph."""
    *first, down, scale, bias, dtype = args
    both = OPS.scaled_linear.default(*first, dtype)
    gated = act_and_mul_quantized(both, False, group_of(scale), down.dtype)
    out: Tensor = OPS.scaled_linear.default(*gated, down, scale, bias, dtype)
    return out


FORMULAS: Formulas = {
    **lower.FORMULAS,
    **GEMMS,
    **QUANTIZING,
    OPS.qk_norm.default: qk_norm,
    OPS.all_reduce_add_rms_norm.default: all_reduce_add_rms_norm,
    OPS.lora.default: lora,
    OPS.linear_w4a16.default: linear_w4a16,
    OPS.mlp_w8a8.default: mlp_w8a8,
}
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def apply(step: Pass, graph: fx.Graph) -> tuple[fx.Graph, PassReport]:
    """A pass's result, after making sure that it left its argument alone."""
    before = _content(graph)
    after, report = step.run(graph)
    assert before == _content(graph)
    assert after is not graph
    return after, report


def _content(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """All that a pass might change of a graph."""
    return [(node, node.target, node.args, dict(node.kwargs), dict(node.meta)) for node in graph.nodes]


def check_well_formed(traced: Traced, before: fx.Graph, after: fx.Graph) -> None:
    """FX finds nothing wrong, nothing is dead or mutates, and meta says of every tensor what it will be."""
    after.lint()
    calls = [node for node in after.nodes if node.op == "call_function"]
    assert all("val" in node.meta for node in calls)
    assert not [node for node in calls if is_mutating(node)]
    num_dead = sum(not node.users for node in before.nodes if node.op == "call_function")
    assert sum(not node.users for node in calls) <= num_dead
    for node, result in results_of(after, traced.values(7)).items():
        if isinstance(result, Tensor):
            _check_meta(node, result, num_tokens=7)


def _check_meta(node: fx.Node, result: Tensor, num_tokens: int) -> None:
    """A tensor is what its node's meta promised."""
    promised = node.meta["val"]
    assert result.dtype == promised.dtype, node.format_node()
    assert list(result.shape) == _sizes(promised.shape, num_tokens), node.format_node()
    promised_strides = _sizes(promised.stride(), num_tokens)
    assert strides_that_count(result) == [
        stride for size, stride in zip(result.shape, promised_strides, strict=True) if size != 1
    ], node.format_node()


def _sizes(symbolic: Any, num_tokens: int) -> list[int]:
    return [size if isinstance(size, int) else _evaluate(size.node.expr, num_tokens) for size in symbolic]


def _evaluate(expression: Any, num_tokens: int) -> int:
    return int(expression.subs(dict.fromkeys(expression.free_symbols, num_tokens)))


def check_values(traced: Traced, after: fx.Graph) -> None:
    """The program's bits for every number of tokens, the named ops standing for their formulas in ATen."""
    for num_tokens, expected in traced.expected.items():
        got = run(after, traced.values(num_tokens), FORMULAS)
        for left, right in zip(expected, got, strict=True):
            assert_same_bits(left, right)


def check_values_of_ops(traced: Traced, after: fx.Graph) -> None:
    """The program's bits with the named ops run, or nearly where their kernels have digits of their own.

    GEMMs run as their formulas: tests of the ops judge the order in which kernels add.
    """
    got = run(after, traced.values(7), GEMMS)
    is_exact = not any(node.target in OWN_DIGITS for node in after.nodes)
    for left, right in zip(traced.expected[7], got, strict=True):
        if is_exact:
            assert_same_bits(left, right)
        else:
            # a last bit of a term is one of the sum it goes into, which may be smaller than its terms
            largest = left.nan_to_num(0, 0, 0).abs().max().item() if left.numel() else 0.0
            digits = (4 if left.element_size() == 2 else 64) * torch.finfo(left.dtype).eps
            torch.testing.assert_close(right, left, equal_nan=True, rtol=digits, atol=digits * largest)


def assert_same_bits(left: Tensor, right: Tensor) -> None:
    """NaN equals NaN; zeros differ by their sign."""
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    bits = BITS[left.element_size()]
    same = (left.contiguous().view(bits) == right.contiguous().view(bits)) | (left.isnan() & right.isnan())
    assert same.all(), f"{int((~same).sum())} of {same.numel()} values differ: {left[~same]} {right[~same]}"


def check_memory(traced: Traced, after: fx.Graph) -> None:
    """Outputs keep their order, strides, and which of them share memory with each other or with an input."""
    assert _memory(traced, traced.graph) == _memory(traced, after)


def _memory(traced: Traced, graph: fx.Graph) -> tuple[Any, Any]:
    values = traced.values(7)
    outputs = run(graph, values)
    addresses = [tensor.untyped_storage().data_ptr() for tensor in (*values, *outputs)]
    sharing = [addresses.index(address) for address in addresses]
    return sharing, [
        (tensor.shape, strides_that_count(tensor), tensor.storage_offset()) for tensor in outputs
    ]


def strides_that_count(tensor: Tensor) -> list[int]:
    """Those of dimensions of more than one; the others move nothing, and torch is free with them."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def check_idempotent(step: Pass, after: fx.Graph) -> None:
    """Run again, a pass finds nothing and changes nothing."""
    again, report = step.run(after)
    assert report.num_matches == 0
    assert canonical_text(again) == canonical_text(after)


def check_report(before: fx.Graph, after: fx.Graph, report: PassReport) -> None:
    """The text, and with it every key, changes if and only if the pass reports that it changed something."""
    assert (canonical_text(before) != canonical_text(after)) == (report.num_matches > 0)
