"""lamina::add_rms_norm_linear, a residual sum, its norm and the projection behind it in one step."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.registry import Provider
from . import _composed, _cpu, reference


def add_rms_norm_linear(
    x: Tensor,  # [num_tokens, hidden]
    residual: Tensor,  # like x
    norm_weight: Tensor,  # [hidden]
    eps: float,
    weight: Tensor,  # [out_features, hidden]; with silu_and_mul the gate's rows, then as many of up
    bias: Tensor | None,  # [out_features]
    silu_and_mul: bool,
    scale: Tensor | None = None,  # [out_features] float32: of the rows of a weight in int8
    batch_invariant: bool = False,  # as of linear
) -> tuple[Tensor, Tensor]:
    """(linear(n, weight, bias), s) with n, s = add_rms_norm(x, residual, norm_weight, eps).

    With a scale the projection is linear_int8(n, weight, scale, bias). With silu_and_mul the first result is
    silu_and_mul of that projection, [num_tokens, out_features / 2]. Whatever is rounded by those ops one
    after another is rounded here: s, n, the projection, silu of the gate.
    """
    result: tuple[Tensor, Tensor] = torch.ops.lamina.add_rms_norm_linear.default(
        x, residual, norm_weight, eps, weight, bias, silu_and_mul, scale, batch_invariant
    )
    return result


def _fake(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    silu_and_mul: bool,
    scale: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    rows = weight.shape[0] // 2 if silu_and_mul else weight.shape[0]
    return x.new_empty((x.shape[0], rows)), x.new_empty(x.shape)


def _check(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    silu_and_mul: bool,
    scale: Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[1:] != x.shape[1:]:
        got = f"x is {list(x.shape)}, weight {list(weight.shape)}"
        raise ShapeError(f"add_rms_norm_linear: {got}; wanted [T, hidden] and [out, hidden]")
    if residual.shape != x.shape or norm_weight.shape != x.shape[1:]:
        got = f"residual is {list(residual.shape)}, norm_weight {list(norm_weight.shape)}"
        raise ShapeError(f"add_rms_norm_linear: {got}; wanted {list(x.shape)} and [{x.shape[1]}]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"add_rms_norm_linear: bias is {list(bias.shape)}; wanted [{weight.shape[0]}]")
    if silu_and_mul and weight.shape[0] % 2:
        raise ShapeError(
            f"add_rms_norm_linear: weight is {list(weight.shape)}; wanted as many rows of gate as up"
        )
    others = [residual, norm_weight, *([weight] if scale is None else []), *([] if bias is None else [bias])]
    if any(other.dtype != x.dtype for other in others):
        got = ", ".join(str(other.dtype) for other in others)
        raise ShapeError(f"add_rms_norm_linear: residual, weights and bias are {got}; wanted x's {x.dtype}")
    if scale is not None:
        _check_bytes(weight, scale)


def _check_bytes(weight: Tensor, scale: Tensor) -> None:
    got = f"weight is {weight.dtype}, scale {scale.dtype} {list(scale.shape)}"
    if weight.dtype != torch.int8 or scale.dtype != torch.float32 or scale.shape != weight.shape[:1]:
        wanted = f"torch.int8, and torch.float32 [{weight.shape[0]}]"
        raise ShapeError(f"add_rms_norm_linear: {got}; wanted {wanted}")
    if not weight.is_contiguous() or not scale.is_contiguous():
        raise ShapeError("add_rms_norm_linear: wanted bytes and their scale contiguous")


define_op(
    "add_rms_norm_linear(Tensor x, Tensor residual, Tensor norm_weight, float eps, Tensor weight,"
    " Tensor? bias, bool silu_and_mul, Tensor? scale=None, bool batch_invariant=False) -> (Tensor, Tensor)",
    fake=_fake,
    check=_check,
    providers=(
        _composed.PROVIDER,
        _cpu.PROVIDER,
        Provider(name="reference", load=lambda: reference.add_rms_norm_linear),
    ),
)
