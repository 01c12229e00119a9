"""Structured outputs: which tokens each constrained sample may be, as bits, by the grammar of its request."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...common.errors import LaminaError, RequestError
from ..protocol.scheduler_output import Constrained
from ..structured_output.compiler import error_of
from ..structured_output.excluded_tokens import BadWords, completing, nothing_but_bad_words
from ..structured_output.unique_items import UniqueItemsMatcher
from .grammar_walk import GrammarWalk
from .mask_thread import CheaperWay, Job, MaskThread

Bits = NDArray[np.int32]  # [samples, words], a bit an id: bit i % 32 of word i // 32
# (a grammar, which of its lexers) -> llguidance's matcher, at the beginning of an answer
NewMatcher = Callable[[str, int], Any]
# (a constrained sample, so many of its newest tokens) -> them, which may have to arrive from the device
NewestTokens = Callable[[Constrained, int], Sequence[int]]
Limits = Mapping[int, NDArray[np.int32]]  # bits [words] of the ids that a sample may be by its parameters


class Failure(NamedTuple):
    """Why a request has no token."""

    num_drafts: int  # after so many of its drafts in the step, if they hold
    error: LaminaError


WORTH_A_THREAD = 300e-6  # seconds of masks: a thread that sleeps takes a tenth of a millisecond to be woken
MAX_LEXERS = 4  # of a grammar, each with its own lock, so that as many threads can compute masks of it
ROWS_OF_A_LEXER = 16  # requests that are live at once before another lexer is compiled
BITS = 1 << np.arange(32, dtype=np.uint32)
NO_LIMITS: Limits = {}
NO_WORDS: Mapping[int, BadWords] = {}
Walk = Future[GrammarWalk] | GrammarWalk  # a future until it is asked for
Held = tuple[Constrained, Walk | None]  # None: its request is gone
Standing = tuple[Constrained, GrammarWalk]


def no_newest_tokens(one: Constrained, count: int) -> Sequence[int]:
    """Where no sample is constrained."""
    raise AssertionError(f"{one.request_id} is constrained, and nobody knows its last {count} tokens")


@dataclass(slots=True)
class MasksInMaking:
    """Masks of a step that finish() finishes: some that the thread makes, or could, and all others."""

    bits: Bits
    limits: Limits
    standing: list[Standing]
    failures: dict[str, Failure]  # of requests that do not stand where their tokens say
    beside: list[Standing]  # those that the thread makes, or could
    job: Job | None = None  # in which it does
    seconds: float = 0.0  # that it took to begin with that


class GrammarMasks:
    """The matchers of requests, each as far as the tokens that it was given.

    A matcher is compiled beside the steps, and waited for by the first sample of its request. It is moved to
    where its request stands by counts alone: back where steps were undone or drafts did not hold, forward by
    the newest tokens. Nothing touches a matcher while the thread computes its mask.
    """

    def __init__(
        self, new_matcher: NewMatcher | None, *, jump_forward: bool = True, num_threads: int = 0
    ) -> None:
        """new_matcher: None where there is no tokenizer, and so no grammar.

        jump_forward: whether forced() says what comes without a sample. num_threads: for masks that are made
        beside the steps, where that is worth it; with 0 they are made by finish().
        """
        self._new_matcher = new_matcher
        self._jump_forward = jump_forward
        self._num_threads = min(num_threads, MAX_LEXERS)
        self._pool: ThreadPoolExecutor | None = None
        self._thread = MaskThread()
        # by how many masks there are, in powers of two
        self._ways: defaultdict[int, CheaperWay] = defaultdict(CheaperWay)
        self._executors: dict[int, Any] = {}  # llguidance's own threads, by how many
        self._job: Job | None = None  # the last
        self._lexers: dict[str, tuple[str, int]] = {}  # the grammar of each request, and which lexer of it
        self._users: defaultdict[tuple[str, int], set[str]] = defaultdict(set)  # the requests that have it
        self._walks: dict[str, Walk] = {}

    def add(self, request_id: str, grammar: str) -> None:
        """Know a request's grammar, until remove()."""
        assert self._new_matcher is not None, "a grammar without a tokenizer"
        self.remove(request_id)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(2, thread_name_prefix="lamina-grammars")
        lexer = self._lexers[request_id] = grammar, self._lexer_for(grammar)
        self._users[lexer].add(request_id)
        self._walks[request_id] = self._pool.submit(_new_walk, self._new_matcher, *lexer)

    def remove(self, request_id: str) -> None:
        """Let go of it, if there is any."""
        if (lexer := self._lexers.get(request_id)) is not None:
            self._users[lexer].discard(request_id)
            if not self._users[lexer]:
                del self._users[lexer]
            del self._lexers[request_id]
        if isinstance(walk := self._walks.pop(request_id, None), Future):
            walk.cancel()

    def close(self) -> None:
        """Let go of all of them, and of the threads."""
        self._walks.clear()
        self._lexers.clear()
        self._users.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._thread.close()

    def held(self, constrained: Sequence[Constrained]) -> list[Held]:
        """Constrained samples with their requests' walks, for begin(), which may come after remove()."""
        return [(one, self._walks.get(one.request_id)) for one in constrained]

    def restrict(
        self,
        bits: Bits,
        constrained: Sequence[Constrained],
        newest: NewestTokens,
        banned: Mapping[int, Sequence[int]],
        limits: Limits = NO_LIMITS,
    ) -> dict[str, Failure]:
        """What begin() and finish() come to, at once."""
        return self.finish(self.begin(bits, self.held(constrained), newest, limits), banned)

    def begin(
        self, bits: Bits, held: Sequence[Held], newest: NewestTokens, limits: Limits = NO_LIMITS
    ) -> MasksInMaking:
        """Move to the newest tokens, and have masks made by a thread where that is worth it.

        bits: memory of all masks of the step, of which constrained samples' own are written. limits: by place
        among these samples, what else they are held to.
        """
        self._wait()
        standing: list[Standing] = []
        failures: dict[str, Failure] = {}
        for one, own in held:
            try:
                walk = self._arrived(one.request_id, own)
                if walk is not None and walk.move(one.num_output, partial(newest, one)):
                    standing.append((one, walk))
                    continue
            except LaminaError as failure:
                failures[one.request_id] = Failure(0, failure)
            _open(bits, one, limits)
        beside = [each for each in standing if _can_be_made_beside(*each)] if self._num_threads else []
        if sum(walk.mask_seconds for _, walk in beside) < WORTH_A_THREAD:
            beside = []
        making = MasksInMaking(bits, limits, standing, failures, beside)
        if beside and self._ways[len(beside).bit_length()].is_thread():
            started = time.perf_counter()
            making.job = self._start(beside, bits)
            making.seconds = time.perf_counter() - started
        return making

    def finish(
        self,
        making: MasksInMaking,
        banned: Mapping[int, Sequence[int]],
        bad_words: Mapping[int, BadWords] = NO_WORDS,
    ) -> dict[str, Failure]:
        """Leave in the bits what the grammars allow; returns by request what fails first.

        banned: by place among these samples, ids that are excluded beside them. bad_words: likewise, by the
        first sample of a request, words whose last ids the device excludes. A sample that fails keeps a bit,
        and its token means nothing; so does one after a draft that its grammar leaves out. One after drafts
        that may hold has no bit where nothing is left. What was interrupted may be asked for again.
        """
        bits, limits, failures = making.bits, making.limits, making.failures
        failures |= self._fill(making)
        for one, _ in making.standing if banned or limits else ():
            for which in range(one.which, one.which + 1 + len(one.drafts)):
                if which in limits:
                    bits[which] &= limits[which]
                _clear(bits[which], banned.get(which, ()))
        have_any = (np.bitwise_or.reduce(bits, axis=1) != 0).tolist()
        for one, walk in making.standing:
            own = have_any[one.which : one.which + 1 + len(one.drafts)]
            if all(own) and not walk.matcher.is_error():
                continue
            if not own[0] or walk.matcher.is_error():
                failures[one.request_id] = Failure(0, _failure(walk.matcher))
                _open(bits, one, limits)
            elif one.request_id not in failures:
                failures[one.request_id] = Failure(own.index(False), _failure(walk.matcher))
        for one, walk in making.standing if bad_words else ():
            if one.which in bad_words and one.request_id not in failures:
                failures |= _where_bad_words_are_all(bits, one, walk, bad_words[one.which])
        return {**failures}

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
                walk = self._walk(one.request_id)
                if not walk.has_seen(one.num_output):
                    self._wait()
                found[one.request_id] = walk.forced_after(one.num_output, token)
        return {request_id: tokens for request_id, tokens in found.items() if tokens}

    def _walk(self, request_id: str) -> GrammarWalk:
        """A request's walk, waited for where it is still to begin; raises what was wrong with its grammar."""
        walk = self._walks[request_id]
        if isinstance(walk, Future):
            walk = self._walks[request_id] = walk.result()
        return walk

    def _arrived(self, request_id: str, own: Walk | None) -> GrammarWalk | None:
        """The same of one that is held, None where its request was removed before it had begun."""
        if not isinstance(own, Future):
            return own
        if self._walks.get(request_id) is own:
            return self._walk(request_id)
        with suppress(CancelledError):
            return own.result()
        return None

    def _lexer_for(self, grammar: str) -> int:
        """The lexer of a grammar that has the fewest live requests, of as many as these are worth."""
        live = [len(self._users.get((grammar, lexer), ())) for lexer in range(MAX_LEXERS)]
        num = max(1, min(self._num_threads, 1 + sum(live) // ROWS_OF_A_LEXER))
        return live.index(min(live[:num]))

    def _fill(self, making: MasksInMaking) -> dict[str, Failure]:
        """Write the masks that the thread does not; returns by request what fails after a draft."""
        failures: dict[str, Failure] = {}
        own = {id(walk) for _, walk in making.beside}
        for one, walk in making.standing:
            if id(walk) in own:
                continue
            if not one.drafts:
                walk.write_mask(one.num_output, making.bits[one.which])
            elif (failure := self._look_at(one, walk, making.bits[one.which :])) is not None:
                failures[one.request_id] = failure
        if making.beside:
            self._fill_those_beside(making)
        return failures

    def _fill_those_beside(self, making: MasksInMaking) -> None:
        """Wait for the thread, or do without, and note what it took."""
        started = time.perf_counter()
        if making.job is not None:
            making.job.result()
        else:
            for one, walk in making.beside:
                walk.write_mask(one.num_output, making.bits[one.which])
        seconds = making.seconds + time.perf_counter() - started
        num = len(making.beside)
        self._ways[num.bit_length()].note(making.job is not None, seconds / num)

    def _start(self, rows: list[Standing], bits: Bits) -> Job:
        """Have masks made by a thread for each lexer: those of one would wait for each other."""
        rows.sort(key=lambda each: each[1].lexer)
        num = min(self._num_threads, len({walk.lexer for _, walk in rows}))
        if num not in self._executors:
            from llguidance import LLExecutor

            self._executors[num] = LLExecutor(num)
        self._job = job = Job(partial(_make, self._executors[num], num, rows, bits))
        self._thread.start(job)
        return job

    def _wait(self) -> None:
        """Until no thread has a matcher."""
        if self._job is not None:
            self._job.wait()
            self._job = None

    def _look_at(self, one: Constrained, walk: GrammarWalk, masks: Bits) -> Failure | None:
        """Write the masks of a row's samples; what fails after a draft, where the mask has no bit."""
        masks[: 1 + len(one.drafts)] = -1
        error = walk.look_at(one.num_output, one.drafts, masks)
        if error is None:
            return None
        place, why = error
        masks[place] = 0
        assert self._new_matcher is not None
        walk.another(self._new_matcher(*self._lexers[one.request_id]), one.num_output, one.drafts)
        return Failure(place, _cannot_go_on(why))


def _new_walk(new_matcher: NewMatcher, grammar: str, lexer: int) -> GrammarWalk:
    return GrammarWalk(new_matcher(grammar, lexer), lexer=hash((grammar, lexer)))


def _can_be_made_beside(one: Constrained, walk: GrammarWalk) -> bool:
    """Whether its mask is llguidance's alone, and one that its matcher is to compute."""
    if one.drafts or isinstance(walk.matcher, UniqueItemsMatcher) or walk.matcher.is_stopped():
        return False
    return walk.token_at(one.num_output) is None


def _make(executor: Any, num_threads: int, rows: Sequence[Standing], bits: Bits) -> None:
    given = [(walk.matcher, one.which) for one, walk in rows]
    started = time.perf_counter()
    executor.unsafe_compute_mask_ptr(given, bits.ctypes.data, bits.shape[1] * bits.itemsize, len(bits))
    each = (time.perf_counter() - started) * num_threads / len(rows)
    for _, walk in rows:
        walk.mask_seconds = each


def _open(bits: Bits, one: Constrained, limits: Limits) -> None:
    """Allow what a request's parameters alone do, at each of its samples."""
    for which in range(one.which, one.which + 1 + len(one.drafts)):
        bits[which] = limits.get(which, -1)


def _where_bad_words_are_all(
    bits: Bits, one: Constrained, walk: GrammarWalk, words: BadWords
) -> dict[str, Failure]:
    """The failure of a request at its first sample where nothing is left but what completes a bad word."""
    before = walk.before(one.num_output)
    for place in range(1 + len(one.drafts)):
        left = bits[one.which + place].copy()
        _clear(left, completing(words, (*before, *one.drafts[:place])))
        if not left.any():
            return {one.request_id: Failure(place, nothing_but_bad_words(one.num_output + place))}
    return {}


def _cannot_go_on(why: str) -> RequestError:
    return RequestError(f"structured_outputs cannot go on: {why}")


def _failure(matcher: Any) -> RequestError:
    if matcher.is_error():
        return _cannot_go_on(error_of(matcher))
    return RequestError(
        "structured_outputs leaves no token here that min_tokens and allowed_token_ids allow as well; "
        "wanted a form that they agree with"
    )


def _clear(bits: NDArray[np.int32], ids: Iterable[int]) -> None:
    words = bits.view(np.uint32)
    for id_ in ids:
        words[id_ // 32] &= ~BITS[id_ % 32]
