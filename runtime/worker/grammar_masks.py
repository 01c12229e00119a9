"""Structured outputs: which tokens each constrained sample may be, as bits, by the grammar of its request."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...common.errors import LaminaError, RequestError
from ..protocol.scheduler_output import Constrained
from ..structured_output.compiler import error_of
from ..structured_output.unique_items import UniqueItemsMatcher
from .grammar_walk import GrammarWalk

Bits = NDArray[np.int32]  # [samples, words], a bit an id: bit i % 32 of word i // 32
NewMatcher = Callable[[str], Any]  # a grammar's llguidance matcher, at the beginning of an answer
# (a constrained sample, so many of its newest tokens) -> them, which may have to arrive from the device
NewestTokens = Callable[[Constrained, int], Sequence[int]]


class Failure(NamedTuple):
    """Why a request has no token."""

    num_drafts: int  # after so many of its drafts in the step, if they hold
    error: LaminaError


SLOW = 50e-6  # seconds of a mask that may be worth a thread: most take a tenth of it, long strings more
NUM_THREADS = 8
WORTH_THREADS = 1e-3  # seconds of slow masks, since threads that sleep take long to be woken
BITS = 1 << np.arange(32, dtype=np.uint32)


def no_newest_tokens(one: Constrained, count: int) -> Sequence[int]:
    """Where no sample is constrained."""
    raise AssertionError(f"{one.request_id} is constrained, and nobody knows its last {count} tokens")


class GrammarMasks:
    """The matchers of requests, each as far as the tokens that it was given.

    A matcher is compiled beside the steps, and waited for by the first sample of its request. It is moved to
    where its request stands by counts alone: back where steps were undone or drafts did not hold, forward by
    the newest tokens.
    """

    def __init__(self, new_matcher: NewMatcher | None, *, jump_forward: bool = True) -> None:
        """new_matcher: None where there is no tokenizer, and so no grammar.

        jump_forward: whether forced() says what comes without a sample.
        """
        self._new_matcher = new_matcher
        self._jump_forward = jump_forward
        self._pool: ThreadPoolExecutor | None = None
        self._executor: Any = None  # llguidance's own threads
        self._masks: Bits = np.empty((0, 0), np.int32)  # memory of those of a step, kept for the next
        self._grammars: dict[str, str] = {}  # by request
        self._walks: dict[str, Future[GrammarWalk] | GrammarWalk] = {}  # futures until they are asked for

    def add(self, request_id: str, grammar: str) -> None:
        """Know a request's grammar, until remove()."""
        assert self._new_matcher is not None, "a grammar without a tokenizer"
        if self._pool is None:
            self._pool = ThreadPoolExecutor(2, thread_name_prefix="lamina-grammars")
        self._grammars[request_id] = grammar
        self._walks[request_id] = self._pool.submit(_new_walk, self._new_matcher, grammar)

    def remove(self, request_id: str) -> None:
        """Let go of it, if there is any."""
        self._grammars.pop(request_id, None)
        if isinstance(walk := self._walks.pop(request_id, None), Future):
            walk.cancel()

    def close(self) -> None:
        """Let go of all of them, and of the threads."""
        self._walks.clear()
        self._grammars.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def restrict(
        self,
        bits: Bits,
        constrained: Sequence[Constrained],
        newest: NewestTokens,
        banned: Mapping[int, Sequence[int]],
    ) -> dict[str, Failure]:
        """Clear the bits of tokens that the grammars leave out; returns by request what fails first.

        bits: with a bit for what else is allowed. banned: by place among these samples, ids that are
        excluded beside them. A sample that fails keeps a bit, and its token means nothing; so does one after
        a draft that its grammar leaves out. One after drafts that may hold has no bit where nothing is left.
        """
        failures: dict[str, Failure] = {}
        masks = self._all_set(bits.shape)
        standing: list[tuple[Constrained, GrammarWalk]] = []
        for one in constrained:
            try:
                walk = self._walk(one.request_id)
            except LaminaError as failure:
                failures[one.request_id] = Failure(0, failure)
                continue
            if walk.move(one.num_output, partial(newest, one)):
                standing.append((one, walk))
        failures |= self._fill(standing, masks)
        for one, _ in standing if banned else ():
            for which in range(one.which, one.which + 1 + len(one.drafts)):
                _clear(masks[which], banned.get(which, ()))
        left = np.bitwise_and(bits, masks, out=masks)
        have_any = (np.bitwise_or.reduce(left, axis=1) != 0).tolist()
        for one, walk in standing:
            own = slice(one.which, one.which + 1 + len(one.drafts))
            if all(have_any[own]) and not walk.matcher.is_error():
                continue
            if not have_any[one.which] or walk.matcher.is_error():
                failures[one.request_id] = Failure(0, _failure(walk.matcher))
                left[own] = bits[own]
            elif one.request_id not in failures:
                failures[one.request_id] = Failure(have_any[own].index(False), _failure(walk.matcher))
        bits[:] = left
        return failures

    def forced(
        self, constrained: Sequence[Constrained], sampled: Sequence[int]
    ) -> dict[str, tuple[int, ...]]:
        """The tokens that follow for certain what was sampled, by request; of those that may jump alone.

        sampled: the token of each of these samples.
        """
        found: dict[str, tuple[int, ...]] = {}
        if not self._jump_forward:
            return found
        for one, token in zip(constrained, sampled, strict=True):
            if one.may_jump and one.request_id in self._walks:
                found[one.request_id] = self._walk(one.request_id).forced_after(one.num_output, token)
        return {request_id: tokens for request_id, tokens in found.items() if tokens}

    def _walk(self, request_id: str) -> GrammarWalk:
        """A request's walk, waited for where it is still to begin; raises what was wrong with its grammar."""
        walk = self._walks[request_id]
        if isinstance(walk, Future):
            walk = self._walks[request_id] = walk.result()
        return walk

    def _fill(self, standing: Sequence[tuple[Constrained, GrammarWalk]], masks: Bits) -> dict[str, Failure]:
        """Write the mask of each sample, several at once where their matchers stay where they are.

        Returns by request what fails after a draft.
        """
        together: list[tuple[GrammarWalk, int]] = []
        failures: dict[str, Failure] = {}
        for one, walk in standing:
            alone = one.drafts or isinstance(walk.matcher, UniqueItemsMatcher)
            if alone or walk.token_at(one.num_output) is not None:
                failure = self._look_at(one, walk, masks[one.which :])
                failures |= {} if failure is None else {one.request_id: failure}
            else:
                together.append((walk, one.which))
        self._fill_together(together, masks)
        return failures

    def _fill_together(self, walks: Sequence[tuple[GrammarWalk, int]], masks: Bits) -> None:
        """Write a mask of each, in threads those that took long the last time, if they are worth it."""
        slow = [(walk, which) for walk, which in walks if walk.mask_seconds > SLOW]
        if sum(walk.mask_seconds for walk, _ in slow) > WORTH_THREADS:
            walks = [(walk, which) for walk, which in walks if walk.mask_seconds <= SLOW]
            self._fill_in_threads(slow, masks)
        for walk, which in walks:
            walk.time_mask(masks[which])

    def _fill_in_threads(self, walks: Sequence[tuple[GrammarWalk, int]], masks: Bits) -> None:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(NUM_THREADS)
        width, given = masks.shape[1] * masks.itemsize, [(walk.matcher, which) for walk, which in walks]
        started = time.perf_counter()
        self._executor.unsafe_compute_mask_ptr(given, masks.ctypes.data, width, len(masks))
        each = (time.perf_counter() - started) * NUM_THREADS / len(walks)
        for walk, _ in walks:
            walk.mask_seconds = each

    def _all_set(self, shape: tuple[int, ...]) -> Bits:
        """Masks of a step that leave everything, in memory that the next step has again."""
        if self._masks.shape[0] < shape[0] or self._masks.shape[1] != shape[1]:
            self._masks = np.empty(shape, np.int32)
        masks = self._masks[: shape[0]]
        masks.fill(-1)
        return masks

    def _look_at(self, one: Constrained, walk: GrammarWalk, masks: Bits) -> Failure | None:
        """Write the masks of a row's samples; what fails after a draft, where the mask has no bit."""
        error = walk.look_at(one.num_output, one.drafts, masks)
        if error is None:
            return None
        place, why = error
        masks[place] = 0
        assert self._new_matcher is not None
        walk.another(self._new_matcher(self._grammars[one.request_id]), one.num_output, one.drafts)
        return Failure(place, _cannot_go_on(why))


def _new_walk(new_matcher: NewMatcher, grammar: str) -> GrammarWalk:
    return GrammarWalk(new_matcher(grammar))


def _cannot_go_on(why: str) -> RequestError:
    return RequestError(f"structured_outputs cannot go on: {why}")


def _failure(matcher: Any) -> RequestError:
    if matcher.is_error():
        return _cannot_go_on(error_of(matcher))
    return RequestError(
        "structured_outputs leaves no token here that min_tokens and allowed_token_ids allow as well; "
        "wanted a form that they agree with"
    )


def _clear(bits: NDArray[np.int32], ids: Sequence[int]) -> None:
    words = bits.view(np.uint32)
    for id_ in ids:
        words[id_ // 32] &= ~BITS[id_ % 32]
