"""lamina::adjust_logits on CPU: the formula's numbers, with only the entries touched that change."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .._shared.call_capture import uncapturable
from .._shared.registry import Provider
from .reference import completions, remember, summaries

Row = NDArray[np.float32]
Ids = NDArray[np.int32]


def adjust_logits(
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
    """The op, as op.py states it."""
    lengths = positions.index_select(0, rows)
    remember(history, slots, lengths, token_ids.index_select(0, last_tokens.index_select(0, rows)))
    out[:, num_valid_ids:] = float("-inf")
    excluded = [banned.index_select(0, rows).numpy(), np.empty((len(rows), 0), np.int32)]
    if bad_words.numel():
        excluded[1] = completions(bad_words, history.index_select(0, slots), lengths).numpy()
    given: list[Any] = [rows.tolist(), slots.tolist(), lengths.tolist(), num_prompt.tolist()]
    numbers = zip(*given, *penalties.tolist(), strict=True)
    for i, (row, slot, length, prompt, repetition, frequency, presence) in enumerate(numbers):
        out[i, :num_valid_ids] = logits[row, :num_valid_ids]
        scores: Row = out[i].numpy()
        if bias_ids.shape[1]:
            ids = bias_ids[i].numpy()
            scores[ids[ids >= 0]] += biases[i].numpy()[ids >= 0]
        for table in excluded:
            ids = _valid(table[i], num_valid_ids)
            scores[ids] = _excluded(scores[ids])
        if allowed.shape[1]:
            bits = np.unpackbits(allowed[i].numpy().view(np.uint8), bitorder="little")
            own = scores[:num_valid_ids]
            np.copyto(own, _excluded(own), where=bits[:num_valid_ids] == 0)
        said: Ids = history[slot, :length].numpy()
        if repetition != 1:
            _divide(scores, np.unique(_valid(said, num_valid_ids)), np.float32(repetition))
        if frequency or presence:
            answer = _valid(said[prompt:], num_valid_ids)
            _lower(scores, answer, np.float32(frequency), np.float32(presence))
    if chunks.shape[1]:
        chunks.copy_(summaries(out[:, :num_valid_ids], temperature))


def _valid(ids: Ids, num_valid_ids: int) -> Ids:
    return ids[(ids >= 0) & (ids < num_valid_ids)]


def _excluded(scores: Row) -> Row:
    """-inf, but for NaN and infinity: an exclusion is not to hide that a row is broken."""
    return np.where(scores < np.inf, np.float32(-np.inf), scores)


def _divide(scores: Row, ids: Ids, repetition: np.float32) -> None:
    own = scores[ids]
    with np.errstate(over="ignore", invalid="ignore"):
        scores[ids] = np.where(own > 0, own / repetition, own * repetition)


def _lower(scores: Row, said: Ids, frequency: np.float32, presence: np.float32) -> None:
    ids, times = np.unique(said, return_counts=True)
    with np.errstate(invalid="ignore"):
        scores[ids] = scores[ids] - frequency * times.astype(np.float32) - presence


def load() -> Callable[..., None]:
    """The op's function."""
    return uncapturable(adjust_logits, "NumPy computes what adjust_logits does")


PROVIDER = Provider(name="numpy", load=load, devices=frozenset({"cpu"}))
