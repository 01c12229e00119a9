"""lamina::lora, what low-rank adapters add to a projection, another one for each token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from . import _cpu, _cuda, reference

NO_SLOT = -1  # of tokens without an adapter


def lora(
    y: Tensor,  # [num_tokens, out_features], what the projection came to without an adapter
    x: Tensor,  # [num_tokens, in_features], what it was given
    a: Tensor,  # [num_slots, num_parts * rank, in_features]
    b: Tensor,  # [num_slots, out_features, rank]
    scales: Tensor,  # [num_slots, num_parts] float32; 0: a slot changes nothing of a part
    slots: Tensor,  # [num_tokens or more] int32, of each token; NO_SLOT: it has none
    rows: Sequence[int],  # of each part, so many of the outputs: of a fused projection one for each module
) -> Tensor:
    """y + scale * (x @ a.T) @ b.T by the slot of each token, [num_tokens, out_features], of y's dtype.

    Multiply-adds are in float32 (float64 for float64), nothing between is rounded, and the result is rounded
    once. A token's bits depend on it and on its slot alone; where nothing is added they are those of y.
    In a CUDA graph a, b, scales and slots may be read before the kernels ahead have ended: none of them may
    write these.
    """
    result: Tensor = torch.ops.lamina.lora.default(y, x, a, b, scales, slots, rows)
    return result


def _fake(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int]
) -> Tensor:
    return y.new_empty(y.shape)


def _check(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int]
) -> None:
    check_adapters("lora", y.shape, y.dtype, x, a, b, scales, slots, rows)


def check_adapters(
    op: str,
    y: Sequence[int],
    dtype: torch.dtype,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    slots: Tensor,
    rows: Sequence[int],
) -> None:
    """Refuse, in the name of an op, what is no adapter of a projection that comes to y's shape and dtype."""
    if len(y) != 2 or x.dim() != 2 or len(x) != y[0] or a.dim() != 3 or b.dim() != 3:
        got = f"y is {list(y)}, x {list(x.shape)}, a {list(a.shape)}, b {list(b.shape)}"
        raise ShapeError(
            f"{op}: {got}; wanted [T, out], [T, in], [slots, parts * rank, in], [slots, out, rank]"
        )
    if sum(rows) != y[1] or any(count < 1 for count in rows):
        raise ShapeError(f"{op}: rows is {list(rows)}; wanted the parts of {y[1]} outputs")
    num_slots, num_parts, rank = len(a), len(rows), b.shape[2]
    wanted = (num_slots, num_parts * rank, x.shape[1]), (num_slots, y[1], rank), (num_slots, num_parts)
    if (tuple(a.shape), tuple(b.shape), tuple(scales.shape)) != wanted:
        got = f"a is {list(a.shape)}, b {list(b.shape)}, scales {list(scales.shape)}"
        raise ShapeError(f"{op}: {got}; wanted {', '.join(str(list(shape)) for shape in wanted)}")
    if slots.dim() != 1 or len(slots) < y[0]:
        raise ShapeError(f"{op}: slots is {list(slots.shape)}; wanted [{y[0]}] or longer")
    if {x.dtype, a.dtype, b.dtype} != {dtype}:
        raise ShapeError(f"{op}: x is {x.dtype}, a {a.dtype}, b {b.dtype}; wanted y's {dtype}")
    if slots.dtype != torch.int32 or scales.dtype not in (torch.float32, torch.float64):
        got = f"slots is {slots.dtype}, scales {scales.dtype}"
        raise ShapeError(f"{op}: {got}; wanted torch.int32 and torch.float32")
    if not all(tensor.is_contiguous() for tensor in (a, b, scales, slots)):
        raise ShapeError(f"{op}: wanted a, b, scales and slots contiguous")


define_op(
    "lora(Tensor y, Tensor x, Tensor a, Tensor b, Tensor scales, Tensor slots, int[] rows) -> Tensor",
    fake=_fake,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("lora", dtypes=_cuda.PROVIDER.dtypes),
        _cpu.PROVIDER,
        Provider(name="reference", load=lambda: reference.lora),
    ),
)
