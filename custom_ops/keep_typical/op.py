"""lamina::keep_typical, the tokens whose likelihood is close to what the whole distribution expects."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op, no_result
from .._shared.registry import Provider
from . import _cuda, _numpy, reference


def keep_typical(
    logits: Tensor,  # [n, vocab] float32, rows contiguous
    temperature: Tensor,  # [n] float32, 0: greedy, which is left alone
    typical_p: Tensor,  # [n] float32, 1: off
) -> None:
    """logits with -inf for all but the most typical tokens of a row that have typical_p of its mass.

    Typical are tokens whose surprise, -log p at this temperature, differs least from its mean, the entropy.
    All tokens are kept that are as typical as the one with which the mass is reached.
    """
    torch.ops.lamina.keep_typical.default(logits, temperature, typical_p)


def _check(logits: Tensor, temperature: Tensor, typical_p: Tensor) -> None:
    if logits.dim() != 2 or logits.stride(1) != 1 or logits.dtype != torch.float32:
        got = f"logits is {list(logits.shape)} {logits.dtype} with strides {list(logits.stride())}"
        raise ShapeError(f"keep_typical: {got}; wanted [n, vocab] float32 with contiguous rows")
    for name, column in (("temperature", temperature), ("typical_p", typical_p)):
        if column.dtype != torch.float32 or column.shape != logits.shape[:1] or not column.is_contiguous():
            got = f"{name} is {list(column.shape)} {column.dtype} with strides {list(column.stride())}"
            raise ShapeError(f"keep_typical: {got}; wanted [{len(logits)}] float32, contiguous")


define_op(
    "keep_typical(Tensor(a!) logits, Tensor temperature, Tensor typical_p) -> ()",
    fake=no_result,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        _numpy.PROVIDER,
        Provider(name="reference", load=lambda: reference.keep_typical),
    ),
)
