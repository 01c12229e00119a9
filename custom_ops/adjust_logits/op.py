"""lamina::adjust_logits, biases, bans and penalties on logits, by the tokens so far, before one is chosen."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op, no_result
from .._shared.registry import Provider
from ..sample.reference import num_chunks_of
from . import _cpu, _cuda, _numpy, reference


def adjust_logits(
    logits: Tensor,  # [n, vocab] of any float type, rows contiguous
    rows: Tensor,  # [m] int64: the rows to adjust
    history: Tensor,  # [num_slots, any number] int32: tokens of requests, prompt and answer
    slots: Tensor,  # [m] int64: where the row's tokens are
    positions: Tensor,  # [n] int64, of every row of logits: how many tokens there are before the next
    token_ids: Tensor,  # [any number] int32
    last_tokens: Tensor,  # [n] int32: where among these the last one before is, which is put into the history
    num_prompt: Tensor,  # [m] int32: how many tokens are the prompt
    penalties: Tensor,  # [3, m] float32: repetition (1: off), frequency (0: off), presence (0: off)
    bias_ids: Tensor,  # [m, any number] int32, each id once, -1: none
    biases: Tensor,  # like bias_ids, float32
    allowed: Tensor,  # [m, 0 or a bit an id] int32: bit i % 32 of word i // 32 is 1 for ids that are allowed
    bad_words: Tensor,  # [m, any number, longest] int32, each word at the right, -1 before it
    banned: Tensor,  # [n, any number] int32: ids never to be chosen, -1: none
    temperature: Tensor,  # [m] float32, with which tokens are to be drawn from out, 0: greedy
    num_valid_ids: int,  # ids from here on are padding of the vocabulary
    out: Tensor,  # [m, num_valid_ids or more] float32, rows contiguous
    chunks: Tensor,  # [m, 0 or a chunk every 256 valid ids, 2] float32, for lamina::sample; 0: not wanted
) -> None:
    """out = the rows' logits with biases added, -inf for what must not be said, and less the penalties.

    An id must not be said that is banned, not allowed, no valid id, or would complete a bad word; one whose
    logit is NaN or infinite keeps it, so that sample sees what is broken. Then tokens
    of prompt or answer have their logits divided by the repetition penalty, or multiplied where negative, and
    those of the answer are lowered by the frequency penalty times their number, then by the presence penalty.
    Of each chunk of out, chunks says the largest, and the sum of exp((out - largest) / temperature).
    """
    torch.ops.lamina.adjust_logits.default(
        logits,
        rows,
        history,
        slots,
        positions,
        token_ids,
        last_tokens,
        num_prompt,
        penalties,
        bias_ids,
        biases,
        allowed,
        bad_words,
        banned,
        temperature,
        num_valid_ids,
        out,
        chunks,
    )


def _check(
    logits: Tensor,
    rows: Tensor,
    history: Tensor,
    slots: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    last_tokens: Tensor,
    num_prompt: Tensor,
    penalties: Tensor,
    bias_ids: Tensor,
    biases: Tensor,
    allowed: Tensor,
    bad_words: Tensor,
    banned: Tensor,
    temperature: Tensor,
    num_valid_ids: int,
    out: Tensor,
    chunks: Tensor,
) -> None:
    if logits.dim() != 2 or logits.stride(1) != 1 or not logits.is_floating_point():
        got = f"logits is {list(logits.shape)} {logits.dtype} with strides {list(logits.stride())}"
        raise ShapeError(f"adjust_logits: {got}; wanted [n, vocab] of floats with contiguous rows")
    if not 0 < num_valid_ids <= logits.shape[1]:
        got = f"num_valid_ids is {num_valid_ids}"
        raise ShapeError(f"adjust_logits: {got}; wanted 1 to {logits.shape[1]}, the vocabulary")
    n, m, words = logits.shape[0], rows.shape[0], allowed.shape[-1]
    if words not in (0, -(-num_valid_ids // 32)):
        wanted = f"0 or {-(-num_valid_ids // 32)}, a bit for each of num_valid_ids"
        raise ShapeError(f"adjust_logits: allowed has {words} words a row; wanted {wanted}")
    any_number = -1
    num_chunks = num_chunks_of(num_valid_ids) if chunks.numel() else chunks.shape[1]
    tensors = {
        "rows": (rows, torch.int64, (m,)),
        "history": (history, torch.int32, (any_number, any_number)),
        "slots": (slots, torch.int64, (m,)),
        "positions": (positions, torch.int64, (n,)),
        "token_ids": (token_ids, torch.int32, (any_number,)),
        "last_tokens": (last_tokens, torch.int32, (n,)),
        "num_prompt": (num_prompt, torch.int32, (m,)),
        "penalties": (penalties, torch.float32, (3, m)),
        "bias_ids": (bias_ids, torch.int32, (m, any_number)),
        "biases": (biases, torch.float32, tuple(bias_ids.shape)),
        "allowed": (allowed, torch.int32, (m, any_number)),
        "bad_words": (bad_words, torch.int32, (m, any_number, any_number)),
        "banned": (banned, torch.int32, (n, any_number)),
        "temperature": (temperature, torch.float32, (m,)),
        "chunks": (chunks, torch.float32, (m, num_chunks, 2)),
    }
    for name, (tensor, dtype, shape) in tensors.items():
        _check_tensor(name, tensor, dtype, shape)
    if out.dtype != torch.float32 or out.dim() != 2 or out.shape[0] != m or out.shape[1] < num_valid_ids:
        got = f"out is {list(out.shape)} {out.dtype}"
        raise ShapeError(f"adjust_logits: {got}; wanted [{m}, {num_valid_ids} or more] float32")
    if out.stride(1) != 1:
        raise ShapeError(f"adjust_logits: out has strides {list(out.stride())}; wanted contiguous rows")


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    fits = tensor.dim() == len(shape) and all(
        want in (-1, size) for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype != dtype or not tensor.is_contiguous():
        got = f"{name} is {list(tensor.shape)} {tensor.dtype} with strides {list(tensor.stride())}"
        wanted = ", ".join("any number" if size == -1 else str(size) for size in shape)
        raise ShapeError(f"adjust_logits: {got}; wanted [{wanted}] {dtype}, contiguous")


define_op(
    "adjust_logits(Tensor logits, Tensor rows, Tensor(a!) history, Tensor slots, Tensor positions,"
    " Tensor token_ids, Tensor last_tokens, Tensor num_prompt, Tensor penalties, Tensor bias_ids,"
    " Tensor biases, Tensor allowed, Tensor bad_words, Tensor banned, Tensor temperature, int num_valid_ids,"
    " Tensor(b!) out, Tensor(c!) chunks) -> ()",
    fake=no_result,
    check=_check,
    providers=(
        _cuda.PROVIDER,
        _cpu.PROVIDER,
        _numpy.PROVIDER,
        Provider(name="reference", load=lambda: reference.adjust_logits),
    ),
)
