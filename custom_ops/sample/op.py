"""lamina::sample, the token ids chosen from a batch's logits."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from ..library import define_op, no_result
from ..registry import Provider
from ..triton_provider import triton_provider
from . import _cpu, _cuda, _numpy, reference


def sample(
    logits: Tensor,  # [n, vocab] of any float type, rows contiguous
    temperature: Tensor,  # [n] float32, 0: greedy
    top_k: Tensor,  # [n] int32, below 1: off
    top_p: Tensor,  # [n] float32, 1: off
    min_p: Tensor,  # [n] float32, 0: off
    seeds: Tensor,  # [n] int64
    positions: Tensor,  # [n] int64, where in its sequence the sampled token will stand
    banned: Tensor,  # [n, any number] int32: ids never to be chosen, -1: none
    num_valid_ids: int,  # ids from here on are padding of the vocabulary
    out: Tensor,  # [n] int32, the chosen ids
) -> None:
    """out = the id of the largest logit, or a draw after temperature, top-k, top-p and min-p, in this order.

    Greedy rows take the lowest id among the largest logits; NaN is largest. Random rows keep the top_k
    likeliest tokens, of them the fewest with at least top_p of their mass, of them those at least min_p times
    as likely as the likeliest; among equals the lowest ids. A draw depends on its row alone: its noise is
    counted from (seed, position, id) and the same on every device.
    """
    torch.ops.lamina.sample.default(
        logits, temperature, top_k, top_p, min_p, seeds, positions, banned, num_valid_ids, out
    )


def _check(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    banned: Tensor,
    num_valid_ids: int,
    out: Tensor,
) -> None:
    if logits.dim() != 2 or logits.stride(1) != 1 or not logits.is_floating_point():
        got = f"logits is {list(logits.shape)} {logits.dtype} with strides {list(logits.stride())}"
        raise ShapeError(f"sample: {got}; wanted [n, vocab] of floats with neighbouring ids side by side")
    num_rows, vocab = logits.shape
    if not 0 < num_valid_ids <= vocab:
        raise ShapeError(f"sample: num_valid_ids is {num_valid_ids}; wanted 1 to {vocab}, the vocabulary")
    columns = (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int64),
        ("out", out, torch.int32),
    )
    for name, column, dtype in columns:
        if column.dtype != dtype or column.shape != (num_rows,) or not column.is_contiguous():
            got = f"{name} is {list(column.shape)} {column.dtype} with strides {list(column.stride())}"
            raise ShapeError(f"sample: {got}; wanted [{num_rows}] {dtype}, contiguous")
    if banned.dtype != torch.int32 or banned.dim() != 2 or banned.shape[0] != num_rows:
        got = f"banned is {list(banned.shape)} {banned.dtype}"
        raise ShapeError(f"sample: {got}; wanted [{num_rows}, any number] int32")
    if not banned.is_contiguous():
        raise ShapeError(f"sample: banned has strides {list(banned.stride())}; wanted it contiguous")


define_op(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds,"
    " Tensor positions, Tensor banned, int num_valid_ids, Tensor(a!) out) -> ()",
    fake=no_result,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        triton_provider("sample", dtypes=_cuda.PROVIDER.dtypes),
        _cpu.PROVIDER,
        _numpy.PROVIDER,
        Provider(name="reference", load=lambda: reference.sample),
    ),
)
