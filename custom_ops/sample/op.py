"""lamina::sample, the token ids chosen from a batch's logits."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op, no_result
from .._shared.registry import Provider
from .._shared.triton_provider import triton_provider
from . import _cpu, _cuda, _numpy, reference
from .reference import num_chunks_of


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
    out: Tensor,  # [n] int32, the chosen ids; -1 where logits are not finite
    row_indices: Tensor | None = None,  # [n] int64: rows of positions, banned and out; None: in order
    chunks: Tensor | None = None,  # [n, chunks, 2] float32, where adjust_logits left them
) -> None:
    """out = the id of the largest logit, or a draw after temperature, top-k, top-p and min-p, in this order.

    Greedy rows take the lowest id among the largest logits. Random rows keep the top_k likeliest tokens, of
    them the fewest with at least top_p of their mass, of them those at least min_p times as likely as the
    likeliest; among equals the lowest ids. Of top_p and min_p a millionth (2**-20) less is enough, so that
    rounding does not decide what lies exactly at a boundary. A row with a logit that is NaN or infinite, or
    without one above -inf that may be chosen, has -1. A draw depends on its row alone: its noise is counted
    from (seed, position, id) and the same on every device.
    """
    torch.ops.lamina.sample.default(
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        banned,
        num_valid_ids,
        out,
        row_indices,
        chunks,
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
    row_indices: Tensor | None = None,
    chunks: Tensor | None = None,
) -> None:
    if logits.dim() != 2 or logits.stride(1) != 1 or not logits.is_floating_point():
        got = f"logits is {list(logits.shape)} {logits.dtype} with strides {list(logits.stride())}"
        raise ShapeError(f"sample: {got}; wanted [n, vocab] of floats with contiguous rows")
    num_rows, vocab = logits.shape
    if not 0 < num_valid_ids <= vocab:
        raise ShapeError(f"sample: num_valid_ids is {num_valid_ids}; wanted 1 to {vocab}, the vocabulary")
    num_targets = num_rows if row_indices is None else positions.shape[0]
    tensors = [
        ("temperature", temperature, torch.float32, (num_rows,)),
        ("top_k", top_k, torch.int32, (num_rows,)),
        ("top_p", top_p, torch.float32, (num_rows,)),
        ("min_p", min_p, torch.float32, (num_rows,)),
        ("seeds", seeds, torch.int64, (num_rows,)),
        ("positions", positions, torch.int64, (num_targets,)),
        ("out", out, torch.int32, (num_targets,)),
        ("banned", banned, torch.int32, (num_targets, *banned.shape[-1:])),
    ]
    if row_indices is not None:
        tensors.append(("row_indices", row_indices, torch.int64, (num_rows,)))
    if chunks is not None:
        tensors.append(("chunks", chunks, torch.float32, (num_rows, num_chunks_of(num_valid_ids), 2)))
    for name, tensor, dtype, shape in tensors:
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            got = f"{name} is {list(tensor.shape)} {tensor.dtype} with strides {list(tensor.stride())}"
            raise ShapeError(f"sample: {got}; wanted {list(shape)} {dtype}, contiguous")


define_op(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds,"
    " Tensor positions, Tensor banned, int num_valid_ids, Tensor(a!) out, Tensor? row_indices=None,"
    " Tensor? chunks=None) -> ()",
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
