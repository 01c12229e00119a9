"""Beam search: of all continuations of a prompt the likeliest, found by keeping several at every length."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...common.errors import UnknownParameterError
from ...common.names import refuse_unknown
from ..other_names import BEAMS
from ..protocol.engine_output import FinishReason
from ..validation import check_flag, integer, number, token_ids
from .logprobs import IMPOSSIBLE

# The likeliest tokens of each beam are as many as there are beams, times the ids that stop and one.
MAX_BEAMS = 512
MAX_BEAM_STOPS = 16

Likeliest = Sequence[tuple[int, float]]  # tokens and their log-probabilities, the likeliest first


@refuse_unknown(UnknownParameterError, BEAMS)
@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearchParams:
    """How wide and how far to search, and what counts as best."""

    beam_width: int = 4
    """Sequences that are kept at every length, and answers that are given."""
    max_tokens: int | None = None
    """Tokens of an answer at most; otherwise until the context is full."""
    length_penalty: float = 1.0
    """Power of the length that sums of log-probabilities are divided by: 0 prefers short answers, 1 is the
    mean, more prefers long ones."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end an answer, beside every EOS."""
    ignore_eos: bool = False
    """Whether to go on where the model ends its answer."""

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            "beam_width": integer(
                "beam_width", self.beam_width, "at least 1", low=1, high=MAX_BEAMS, optional=False
            ),
            "max_tokens": integer("max_tokens", self.max_tokens, "at least 1", low=1),
            "length_penalty": number(
                "length_penalty", self.length_penalty, "0 to 10", high=10.0, optional=False
            ),
            "stop_token_ids": token_ids("stop_token_ids", self.stop_token_ids, MAX_BEAM_STOPS),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # in its stored form
        check_flag("ignore_eos", self.ignore_eos)


class Beam(NamedTuple):
    """A continuation so far, with the sum of the log-probabilities of its tokens."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class BeamSearch:
    """The search for one prompt: `live` beams are to be extended, until nothing better can come.

    A candidate that stops is put aside if it is among the beam_width likeliest of its round; the others that
    are likeliest live on. The search is over when the best that a live beam may become is no better than the
    worst of beam_width that were put aside, or at the last length: max_tokens, or what there is room for.
    """

    def __init__(
        self, params: BeamSearchParams, eos_token_ids: Iterable[int], *, room: int, vocab_size: int
    ) -> None:
        own = params.stop_token_ids or ()
        stop_token_ids = frozenset(own if params.ignore_eos else (*own, *eos_token_ids))
        self.live: list[Beam] = [Beam()]
        self._params = params
        self._stop_token_ids = stop_token_ids
        self._max_tokens = min(params.max_tokens or room, room)
        self._ended: list[Beam] = []
        # Enough for beam_width that live on, should every id that stops be likelier in every beam.
        self._num_candidates = max(2, 1 + len(stop_token_ids)) * params.beam_width
        self._vocab_size = vocab_size

    @property
    def num_top(self) -> int:
        """The number of likeliest tokens of each beam that may matter."""
        return min(self._num_candidates, self._vocab_size)

    def advance(self, tops: Sequence[Likeliest]) -> None:
        """Takes in the likeliest next tokens of each live beam, num_top of each."""
        width = self._params.beam_width
        candidates = [
            Beam((*beam.token_ids, token_id), beam.logprob + logprob)
            for beam, top in zip(self.live, tops, strict=True)
            for token_id, logprob in top
            if logprob > IMPOSSIBLE
        ]
        candidates.sort(key=lambda beam: -beam.logprob)
        judged = [self._judged(beam) for beam in candidates[: self._num_candidates]]
        self._put_aside(beam for beam in judged[:width] if beam.finish_reason is not None)
        self.live = [beam for beam in judged if beam.finish_reason is None][:width]
        if len(self._ended) == width and self.live and self._bound() <= self._score(self._ended[-1]):
            self.live = []

    def stop(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Ends the search with what it has."""
        self._put_aside(beam._replace(finish_reason=reason, stop_reason=stop_reason) for beam in self.live)
        self.live = []

    def best(self) -> list[Beam]:
        """Returns the best sequences of a search that is over, the best first."""
        return self._ended

    def _judged(self, beam: Beam) -> Beam:
        last = beam.token_ids[-1]
        if last in self._stop_token_ids:
            named = last in (self._params.stop_token_ids or ())
            return beam._replace(finish_reason="stop", stop_reason=last if named else None)
        is_longest = len(beam.token_ids) == self._max_tokens
        return beam._replace(finish_reason="length") if is_longest else beam

    def _put_aside(self, beams: Iterable[Beam]) -> None:
        ranked = sorted((*self._ended, *beams), key=self._score, reverse=True)
        self._ended = ranked[: self._params.beam_width]

    def _score(self, beam: Beam) -> float:
        return self._weighed(beam.logprob, max(len(beam.token_ids), 1))

    def _bound(self) -> float:
        """Returns what the best live beam would score if all its further tokens were certain."""
        return self._weighed(self.live[0].logprob, self._max_tokens)

    def _weighed(self, logprob: float, num_tokens: int) -> float:
        return logprob / math.pow(num_tokens, self._params.length_penalty)
