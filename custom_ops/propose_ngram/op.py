"""lamina::propose_ngram, the tokens that followed where the last ones of a row came before."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op, no_result
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from . import _cpu, _cuda, reference


def propose_ngram(
    tokens: Tensor,  # [num_blocks, block_size] int32, contiguous: the token at each slot of the paged cache
    block_tables: Tensor,  # [rows, max_blocks] int32, blocks of a row neighbours
    num_computed: Tensor,  # [rows] int32: tokens of the row that lie in its blocks
    newest: Tensor,  # [rows] int32: the one that comes after these
    min_ngram: int,  # 1 to max_ngram
    max_ngram: int,
    out: Tensor,  # [rows, any number] int32, contiguous
) -> None:
    """out = what came after the last place before where a row's last tokens stand as well, or -1.

    Of all places that at least min_ngram and at most max_ngram of the last tokens are found at, the one with
    the most of them is taken, the last of several. What comes after may reach the newest token: then it goes
    on as it began, since a row that repeats itself may do so again.
    """
    torch.ops.lamina.propose_ngram.default(
        tokens, block_tables, num_computed, newest, min_ngram, max_ngram, out
    )


def _check(
    tokens: Tensor,
    block_tables: Tensor,
    num_computed: Tensor,
    newest: Tensor,
    min_ngram: int,
    max_ngram: int,
    out: Tensor,
) -> None:
    named = {
        "tokens": (tokens, 2),
        "block_tables": (block_tables, 2),
        "num_computed": (num_computed, 1),
        "newest": (newest, 1),
        "out": (out, 2),
    }
    for name, (tensor, dims) in named.items():
        is_dense = tensor.is_contiguous() or (name == "block_tables" and tensor.stride(-1) == 1)
        if tensor.dtype != torch.int32 or tensor.dim() != dims or not is_dense:
            got = f"{name} is {list(tensor.shape)} {tensor.dtype} with strides {list(tensor.stride())}"
            raise ShapeError(f"propose_ngram: {got}; wanted {dims} dimensions of int32, contiguous")
    rows = len(out)
    lengths = {"block_tables": len(block_tables), "num_computed": len(num_computed), "newest": len(newest)}
    if {*lengths.values()} != {rows}:
        got = ", ".join(f"{name} has {length} rows" for name, length in lengths.items())
        raise ShapeError(f"propose_ngram: {got}; wanted {rows}, as out has")
    if not 1 <= min_ngram <= max_ngram:
        got = f"min_ngram is {min_ngram} and max_ngram {max_ngram}"
        raise ShapeError(f"propose_ngram: {got}; wanted 1 or more, and min_ngram at most max_ngram")


define_op(
    "propose_ngram(Tensor tokens, Tensor block_tables, Tensor num_computed, Tensor newest, int min_ngram,"
    " int max_ngram, Tensor(a!) out) -> ()",
    fake=no_result,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("propose_ngram"),
        _cpu.PROVIDER,
        Provider(name="reference", load=lambda: reference.propose_ngram),
    ),
)
