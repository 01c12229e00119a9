"""lamina::top_logprobs, the log-probabilities of given tokens and of the likeliest ones."""

import torch
from torch import Tensor

from ...common.errors import ShapeError
from .._shared.library import define_op
from .._shared.registry import Provider
from . import _cuda, reference


def top_logprobs(
    logits: Tensor,  # [n, vocab] of any float type
    token_ids: Tensor,  # [n] int32; what is none counts as padding
    num_valid_ids: int,  # ids from here on are padding of the vocabulary
    num_top: int,  # 0 to num_valid_ids
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row its own token and the num_top likeliest: ids, log-probabilities, the own token's rank.

    ids is int32 [n, 1 + num_top], logprobs float32 of the same shape, ranks int32 [n] from 1 on. Likelier
    tokens come first, lower ids first among equals. Every log-probability is finite: what is impossible, or
    not a number, has -9999, and so has a token of the padding, whose rank is after all others. A row with
    a logit that is NaN or infinite, or of -inf alone, has the rank 0.
    """
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.lamina.top_logprobs.default(
        logits, token_ids, num_valid_ids, num_top
    )
    return result


def _fake(
    logits: Tensor, token_ids: Tensor, num_valid_ids: int, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = len(logits), 1 + num_top
    return (
        token_ids.new_empty(shape),
        logits.new_empty(shape, dtype=torch.float32),
        torch.empty_like(token_ids),
    )


def _check(logits: Tensor, token_ids: Tensor, num_valid_ids: int, num_top: int) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        got = f"logits is {list(logits.shape)} {logits.dtype}"
        raise ShapeError(f"top_logprobs: {got}; wanted [n, vocab] of floats")
    num_rows, vocab = logits.shape
    if token_ids.dtype != torch.int32 or token_ids.shape != (num_rows,):
        got = f"token_ids is {list(token_ids.shape)} {token_ids.dtype}"
        raise ShapeError(f"top_logprobs: {got}; wanted [{num_rows}] int32")
    if not 0 < num_valid_ids <= vocab:
        got = f"num_valid_ids is {num_valid_ids}"
        raise ShapeError(f"top_logprobs: {got}; wanted 1 to {vocab}, the vocabulary")
    if not 0 <= num_top <= num_valid_ids:
        raise ShapeError(f"top_logprobs: num_top is {num_top}; wanted 0 to num_valid_ids, {num_valid_ids}")


define_op(
    "top_logprobs(Tensor logits, Tensor token_ids, int num_valid_ids, int num_top)"
    " -> (Tensor, Tensor, Tensor)",
    fake=_fake,
    check=_check,
    providers=(_cuda.PROVIDER, Provider(name="reference", load=lambda: reference.top_logprobs)),
)
