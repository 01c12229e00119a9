"""Forms beside bad_words and allowed_token_ids: where these leave nothing of what a form allows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...common.errors import RequestError
from ...common.structural_tokens import StructuralTokens
from ..sampling_params import SamplingParams
from ..structured_outputs import StructuredOutputs

BadWords = Sequence[str | Sequence[int]]  # as parameters have them; resolved, so that none is a text
Tokens = Sequence[int]
Ids = NDArray[np.int64]


def completing(words: BadWords, before: Tokens) -> set[int]:
    """Returns the ids that would complete one of these words behind some tokens."""
    return {
        word[-1]
        for word in words
        if not isinstance(word, str)
        and len(word) <= len(before) + 1
        and tuple(before[len(before) - len(word) + 1 :]) == tuple(word[:-1])
    }


def nothing_but_bad_words(place: int) -> RequestError:
    """Returns the error of a request whose bad words are all that its form allows after so many tokens."""
    return _nothing_left(place, "bad_words excludes")


def check_beginning(matcher: Any, prompt: Tokens, params: SamplingParams) -> None:
    """Raises RequestError where a form begins with tokens that its request excludes.

    matcher: at the beginning of an answer; it is moved. params: with bad words as ids. Looks as far as the
    form leaves one way to go on, and at the token behind that.
    """
    forced = matcher.compute_ff_tokens()
    for place, token in enumerate(forced[: params.max_tokens]):
        _check_one(place, np.array([token]), (*prompt, *forced[:place]), params)
    if params.max_tokens is None or params.max_tokens > len(forced):
        matcher.consume_tokens(forced)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        _check_one(len(forced), bits.nonzero()[0], (*prompt, *forced), params)


def check_reasoning_end(form: StructuredOutputs, tokens: StructuralTokens, params: SamplingParams) -> None:
    """Raises RequestError where a request excludes the token without which its reasoning has no end.

    tokens: of the tokenizer. params: with bad words as ids.
    """
    if form.reasoning_end is None or form.reasoning_begin is not None:
        return
    for token in tokens.pieces(form.reasoning_end):
        excluding = _excluding(np.array([token]), (), params) if isinstance(token, int) else None
        if excluding is not None:
            raise RequestError(
                f"structured_outputs has the token {form.reasoning_end!r} at the end of reasoning, which "
                f"{excluding}; wanted a request that allows it"
            )


def _check_one(place: int, ids: Ids, before: Tokens, params: SamplingParams) -> None:
    excluding = _excluding(ids, before, params)
    if excluding is not None:
        raise _nothing_left(place, excluding)


def _excluding(ids: Ids, before: Tokens, params: SamplingParams) -> str | None:
    """Returns what excludes all of some ids behind some tokens, in words; None for nothing."""
    if params.allowed_token_ids:
        ids = ids[np.isin(ids, params.allowed_token_ids)]
    if not len(ids):
        return "allowed_token_ids leaves out"
    bad = [*completing(params.bad_words or (), before)]
    return None if np.isin(ids, bad, invert=True).any() else "bad_words excludes"


def _nothing_left(place: int, excluding: str) -> RequestError:
    return RequestError(
        f"structured_outputs has for token {place + 1} of the answer only tokens that {excluding}; "
        "wanted a form that agrees with it"
    )
