"""Structured outputs: which tokens each constrained sample may be, as bits, by the grammar of its request."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...common.errors import LaminaError, RequestError
from ..protocol.scheduler_output import Constrained
from ..structured_output.compiler import error_of

Bits = NDArray[np.int32]  # [samples, words], a bit an id: bit i % 32 of word i // 32
NewMatcher = Callable[[str], Any]  # a grammar's llguidance matcher, at the beginning of an answer
# (a constrained sample, so many of its newest tokens) -> them, which may have to arrive from the device
NewestTokens = Callable[[Constrained, int], Sequence[int]]


def no_newest_tokens(one: Constrained, count: int) -> Sequence[int]:
    """Where no sample is constrained."""
    raise AssertionError(f"{one.request_id} is constrained, and nobody knows its last {count} tokens")


FEW = 4  # matchers for which threads are not worth it
BITS = 1 << np.arange(32, dtype=np.uint32)


class GrammarMasks:
    """The matchers of requests, each as far as the tokens that it was given.

    A matcher is compiled beside the steps, and waited for by the first sample of its request. It is moved to
    where its request stands by counts alone: back where steps were undone, forward by the newest tokens.
    """

    def __init__(self, new_matcher: NewMatcher | None) -> None:
        """new_matcher: None where there is no tokenizer, and so no grammar."""
        self._new_matcher = new_matcher
        self._pool: ThreadPoolExecutor | None = None
        self._executor: Any = None  # llguidance's own threads
        self._matchers: dict[str, Future[Any]] = {}
        self._num_consumed: dict[str, int] = {}

    def add(self, request_id: str, grammar: str) -> None:
        """Know a request's grammar, until remove()."""
        assert self._new_matcher is not None, "a grammar without a tokenizer"
        if self._pool is None:
            self._pool = ThreadPoolExecutor(2, thread_name_prefix="lamina-grammars")
        self._matchers[request_id] = self._pool.submit(self._new_matcher, grammar)
        self._num_consumed[request_id] = 0

    def remove(self, request_id: str) -> None:
        """Let go of it, if there is any."""
        if (matcher := self._matchers.pop(request_id, None)) is not None:
            matcher.cancel()
        self._num_consumed.pop(request_id, None)

    def close(self) -> None:
        """Let go of all of them, and of the threads."""
        self._matchers.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def restrict(
        self,
        bits: Bits,
        constrained: Sequence[Constrained],
        newest: NewestTokens,
        banned: Mapping[int, Sequence[int]],
    ) -> dict[str, LaminaError]:
        """Clear the bits of tokens that the grammars leave out; returns by request what fails there.

        bits: with a bit for what else is allowed. banned: by place among these samples, ids that are
        excluded beside them. A sample that fails keeps a bit, and its token means nothing.
        """
        failures: dict[str, LaminaError] = {}
        matchers: list[tuple[Any, int]] = []
        for place, one in enumerate(constrained):
            try:
                matcher = self._advanced(one, newest)
            except LaminaError as failure:
                failures[one.request_id] = failure
                continue
            if matcher is not None:
                matchers.append((matcher, place))
        masks: Bits = np.full((len(constrained), bits.shape[1]), -1, np.int32)
        self._fill(matchers, masks)
        for matcher, place in matchers:
            one = constrained[place]
            _clear(masks[place], banned.get(one.which, ()))
            left = bits[one.which] & masks[place]
            wrong = _wrong(matcher, left)
            if wrong is None:
                bits[one.which] = left
            else:
                failures[one.request_id] = wrong
        return failures

    def _advanced(self, one: Constrained, newest: NewestTokens) -> Any:
        """The matcher of a sample's request at that sample, None where the sample before is broken."""
        matcher, num_consumed = self._matchers[one.request_id].result(), self._num_consumed[one.request_id]
        if num_consumed > one.num_output:
            matcher.rollback(num_consumed - one.num_output)
        elif num_consumed < one.num_output:
            tokens = [int(token) for token in newest(one, one.num_output - num_consumed)]
            if min(tokens) < 0:
                return None  # its request ends by what was wrong there
            matcher.consume_tokens(tokens)
        self._num_consumed[one.request_id] = one.num_output
        return matcher

    def _fill(self, matchers: list[tuple[Any, int]], masks: Bits) -> None:
        address, width = masks.ctypes.data, masks.shape[1] * masks.itemsize
        if len(matchers) <= FEW:
            for matcher, place in matchers:
                matcher.unsafe_compute_mask_ptr(address + place * width, width)
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        self._executor.unsafe_compute_mask_ptr(matchers, address, width, len(masks))


def _wrong(matcher: Any, left: NDArray[np.int32]) -> RequestError | None:
    if matcher.is_error():
        return RequestError(f"structured_outputs cannot go on: {error_of(matcher)}")
    if not left.any():
        return RequestError(
            "structured_outputs leaves no token here that min_tokens and allowed_token_ids allow as well; "
            "wanted a form that they agree with"
        )
    return None


def _clear(bits: NDArray[np.int32], ids: Sequence[int]) -> None:
    words = bits.view(np.uint32)
    for id_ in ids:
        words[id_ // 32] &= ~BITS[id_ % 32]
