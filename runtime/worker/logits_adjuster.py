"""Samples chosen again, from logits that are adjusted by the tokens before them."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ... import custom_ops
from ...custom_ops._shared import registry
from ...custom_ops.adjust_logits.reference import WORD_BITS, remember
from ...custom_ops.sample.reference import are_broken, num_chunks_of
from ..protocol.scheduler_output import SAMPLING, Adjusted, Banned, sampling_row
from ..sampling_params import LogitsProcessor, SamplingParams
from ..structured_output.excluded_tokens import BadWords
from .grammar_masks import (
    Failure,
    GrammarMasks,
    Held,
    Limits,
    MasksInMaking,
    NewestTokens,
    no_newest_tokens,
)
from .input_batch import NO_ID, BatchView
from .logits_processors import apply_processors
from .sampler import SamplingRows, sample
from .staging import send, staging

FIRST_SLOTS, FIRST_TOKENS = 8, 1024  # room that a history begins with; it doubles as needed
WIDTH_UNIT = 8  # ids that adjusted rows are a multiple of, so that kernels can load vectors


def load_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Have what adjusts logits of a dtype built before any request can ask for it."""
    registry.select("adjust_logits", device=device, dtype=dtype)
    for op in ("keep_typical", "sample"):
        registry.select(op, device=device, dtype=torch.float32)


class _Tables(NamedTuple):
    """What stays while the same requests have the same samples and slots; see lamina::adjust_logits."""

    adjusted: Adjusted  # that these are of
    samples: Tensor
    slots: Tensor
    num_prompt: Tensor
    penalties: Tensor
    bias_ids: Tensor
    biases: Tensor
    allowed: Tensor
    bad_words: Tensor
    typical_p: Tensor | None  # None: nobody wants it
    temperature: Tensor  # these five as in SamplingRows; the step itself has chosen greedily
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    has_drafts: bool  # a request has several samples
    limits: Limits  # of constrained samples, as `allowed`, on the host

    def are_of(self, adjusted: Adjusted) -> bool:
        """Whether they hold for a step as well."""
        own = self.adjusted
        return (
            own.params == adjusted.params  # most often the same objects, which are not compared
            and np.array_equal(own.samples, adjusted.samples)
            and np.array_equal(own.slots, adjusted.slots)
            and np.array_equal(own.num_prompt, adjusted.num_prompt)
        )

    def sampling_rows(self, batch: BatchView, num_valid_ids: int) -> SamplingRows:
        """What the adjusted samples are sampled with."""
        return SamplingRows(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seeds=self.seeds,
            positions=batch.sample_positions,
            banned=batch.banned,
            num_valid_ids=num_valid_ids,
            row_indices=self.samples,
        )


class BegunChoice(NamedTuple):
    """Adjusted samples whose masks are being made."""

    adjusted: Adjusted
    tables: _Tables
    masks: tuple[Tensor, MasksInMaking] | None  # in memory to send from; None where no sample is constrained


class Adjuster:
    """Adjusts logits of some samples of a step and chooses their tokens anew; no other sample is touched.

    It alone writes the history: tokens by slot and position, in room that grows as needed. Nothing is
    allocated before the first request that needs it, and nothing waits for the device but a request's own
    logits processors.
    """

    def __init__(
        self,
        *,
        num_valid_ids: int,
        device: torch.device,
        max_slots: int,
        max_tokens: int,
        grammars: GrammarMasks | None = None,
    ) -> None:
        self._num_valid_ids = num_valid_ids
        self._device = device
        self._most = max_slots, max_tokens  # what the history may grow to, which memory is kept for
        self._history = torch.empty(0, 0, dtype=torch.int32, device=device)
        self._scores_memory = torch.empty(0, dtype=torch.float32, device=device)
        self._tables: _Tables | None = None
        self.processors: dict[str, Sequence[LogitsProcessor]] = {}  # by the id of a request that brings any
        self.grammars = GrammarMasks(None) if grammars is None else grammars

    def forget(self) -> None:
        """Take nothing for granted of what the device was sent; its tokens are sent again."""
        self._tables = None

    def choose(
        self,
        adjusted: Adjusted,
        batch: BatchView,
        logits: Tensor,
        newest: NewestTokens = no_newest_tokens,
        banned: Banned = (),
    ) -> dict[str, Failure]:
        """What begin() and finish() come to, at once."""
        begun = self.begin(adjusted, self.grammars.held(adjusted.constrained), newest)
        return self.finish(begun, batch, logits, banned)

    def begin(
        self, adjusted: Adjusted, held: Sequence[Held], newest: NewestTokens = no_newest_tokens
    ) -> BegunChoice:
        """Have the masks of a step made, with the step at work already.

        held: its constrained samples, with the walks of their requests. newest: asked for the tokens that
        grammars have not seen.
        """
        tables = self._tables
        if tables is None or not tables.are_of(adjusted):
            tables = self._tables = self._built(adjusted)
        masks = None
        if held:
            num, num_words = len(adjusted.samples), -(-self._num_valid_ids // WORD_BITS)
            memory = staging(num * num_words, self._device).view(num, num_words)
            bits: NDArray[np.int32] = memory.numpy()
            for which in _without_grammar(adjusted):
                bits[which] = tables.limits.get(which, -1)
            masks = memory, self.grammars.begin(bits, held, newest, tables.limits)
        return BegunChoice(adjusted, tables, masks)

    def finish(
        self, begun: BegunChoice, batch: BatchView, logits: Tensor, banned: Banned = ()
    ) -> dict[str, Failure]:
        """Put the tokens of adjusted samples into batch.sampled, over those that were chosen from logits.

        logits: [padded_samples, vocab] of the step, any float, which stay as they are. Returns by request
        what failed there: its logits processors or grammar. Its token means nothing then.
        InterruptAtRequestError is Ctrl-C in one of them. banned: as the plan has it. What was interrupted may
        be asked for again.
        """
        adjusted, tables = begun.adjusted, begun.tables
        self._send_missed(adjusted)
        failures: dict[str, Failure] = {}
        if begun.masks is not None:
            memory, making = begun.masks
            places = {int(sample): which for which, sample in enumerate(adjusted.samples)} if banned else {}
            excluded = {places[sample]: ids for sample, ids in banned if sample in places}
            failures |= self.grammars.finish(making, excluded, _bad_words_of(adjusted))
            tables = tables._replace(allowed=memory.to(self._device, non_blocking=True))
        rows = tables.sampling_rows(batch, self._num_valid_ids)
        is_final = not adjusted.histories and tables.typical_p is None
        scores, chunks = self._adjusted_scores(tables, batch, logits, are_summed=is_final and logits.is_cuda)
        failures |= self._process(adjusted, scores)
        if tables.typical_p is not None:
            custom_ops.keep_typical(scores, rows.temperature, tables.typical_p)
        sample(scores, rows, batch.sampled, chunks)
        return failures

    def _process(self, adjusted: Adjusted, scores: Tensor) -> dict[str, Failure]:
        """Let requests' own processors change their scores [n, width]; returns by request what failed."""
        failures: dict[str, Failure] = {}
        for history in adjusted.histories:
            processors = self.processors[history.request_id]
            own = scores[history.which, : self._num_valid_ids]
            if are_broken(own.unsqueeze(0)):
                continue  # before any of its processors saw them: sample says so
            if (failure := apply_processors(processors, history, own)) is not None:
                failures[history.request_id] = Failure(0, failure)
                own.zero_()
        return failures

    def _adjusted_scores(
        self, tables: _Tables, batch: BatchView, logits: Tensor, *, are_summed: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Adjusted logits of the samples, and what sampling wants to know of their chunks, where it pays."""
        if tables.has_drafts:  # which the samples after them see
            newest = batch.token_ids.index_select(0, batch.logits_rows.index_select(0, tables.samples))
            positions = batch.sample_positions.index_select(0, tables.samples)
            remember(self._history, tables.slots, positions, newest)
        num_rows, width = len(tables.samples), -(-self._num_valid_ids // WIDTH_UNIT) * WIDTH_UNIT
        scores = self._scores_of(num_rows, width)
        chunks = scores.new_empty(num_rows, num_chunks_of(self._num_valid_ids) if are_summed else 0, 2)
        custom_ops.adjust_logits(
            logits,
            tables.samples,
            self._history,
            tables.slots,
            batch.sample_positions,
            batch.token_ids,
            batch.logits_rows,
            tables.num_prompt,
            tables.penalties,
            tables.bias_ids,
            tables.biases,
            tables.allowed,
            tables.bad_words,
            batch.banned,
            tables.temperature,
            self._num_valid_ids,
            scores,
            chunks,
        )
        return scores, chunks if are_summed else None

    def _scores_of(self, num_rows: int, width: int) -> Tensor:
        """Memory for adjusted logits, the same in each step: new memory of that size is slow to be given."""
        if self._scores_memory.numel() < num_rows * width:
            self._scores_memory = self._scores_memory.new_empty(num_rows * width)
        return self._scores_memory[: num_rows * width].view(num_rows, width)

    def _send_missed(self, adjusted: Adjusted) -> None:
        """Write the tokens that the device has missed, but for the newest: adjusting adds that."""
        self._make_room(int(adjusted.slots.max()) + 1, adjusted.longest)
        if not adjusted.missed:
            return
        slots, starts, tokens = zip(*adjusted.missed, strict=True)
        lengths = np.array([*map(len, tokens)])
        firsts = np.array(slots) * self._history.shape[1] + starts
        places = np.arange(lengths.sum()) + np.repeat(firsts - np.cumsum(lengths) + lengths, lengths)
        known = np.fromiter(itertools.chain.from_iterable(tokens), np.int32, len(places))
        self._history.view(-1).index_copy_(0, self._sent(places), self._sent(known))

    def _make_room(self, num_slots: int, num_tokens: int) -> None:
        slots, tokens = self._history.shape
        if num_slots <= slots and num_tokens <= tokens:
            return
        shape = (
            min(self._most[0], _doubled(max(slots, FIRST_SLOTS), num_slots)),
            min(self._most[1], _doubled(max(tokens, FIRST_TOKENS), num_tokens)),
        )
        larger = torch.zeros(shape, dtype=torch.int32, device=self._device)
        larger[:slots, :tokens] = self._history
        self._history = larger

    def _built(self, adjusted: Adjusted) -> _Tables:
        params = adjusted.params
        biases = [own.logit_bias or {} for own in params]
        typical_p = [own.typical_p or 1.0 for own in params]
        penalties = [
            [own.repetition_penalty or 1.0 for own in params],
            [own.frequency_penalty for own in params],
            [own.presence_penalty for own in params],
        ]
        sampling = np.array([sampling_row(own) for own in params], SAMPLING)
        top_k = np.where(sampling["top_k"] < self._num_valid_ids, sampling["top_k"], 0)
        allowed = _allowed(params, self._num_valid_ids)
        return _Tables(
            adjusted=adjusted,
            has_drafts=len({*adjusted.slots.tolist()}) < len(adjusted.slots),
            temperature=self._sent(sampling["temperature"]),
            top_k=self._sent(top_k.astype(np.int32)),
            top_p=self._sent(sampling["top_p"]),
            min_p=self._sent(sampling["min_p"]),
            seeds=self._sent(sampling["seed"]),
            samples=self._sent(adjusted.samples),
            slots=self._sent(adjusted.slots),
            num_prompt=self._sent(adjusted.num_prompt.astype(np.int32)),
            penalties=self._sent(np.array(penalties, np.float32)),
            bias_ids=self._sent(_padded([list(own) for own in biases], NO_ID, "int32")),
            biases=self._sent(_padded([list(own.values()) for own in biases], 0, "float32")),
            allowed=self._sent(allowed),
            limits={which: allowed[which] for which, own in enumerate(params) if own.allowed_token_ids},
            bad_words=self._sent(_bad_words(params)),
            typical_p=self._sent(np.array(typical_p, np.float32)) if min(typical_p) < 1 else None,
        )

    def _sent(self, values: NDArray[Any]) -> Tensor:
        return send(values, self._device)


def _padded(rows: Sequence[Sequence[Any]], padding: int, dtype: str) -> NDArray[Any]:
    """Rows as an array [rows, longest]."""
    table: NDArray[Any] = np.full((len(rows), max(map(len, rows), default=0)), padding, dtype)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = values
    return table


def _allowed(params: Sequence[SamplingParams], num_ids: int) -> NDArray[np.int32]:
    """A bit an id, all of them where a request allows everything; nothing where every one does."""
    num_words = -(-num_ids // WORD_BITS)
    if not any(own.allowed_token_ids for own in params):
        return np.zeros((len(params), 0), np.int32)
    bits = np.zeros((len(params), num_words * WORD_BITS), np.uint8)
    for row, own in zip(bits, params, strict=True):
        row[list(own.allowed_token_ids) if own.allowed_token_ids else slice(None)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def _without_grammar(adjusted: Adjusted) -> list[int]:
    """Which adjusted samples are not constrained."""
    has_none = np.ones(len(adjusted.samples), bool)
    for one in adjusted.constrained:
        has_none[one.which : one.which + 1 + len(one.drafts)] = False
    return has_none.nonzero()[0].tolist()


def _bad_words_of(adjusted: Adjusted) -> dict[int, BadWords]:
    """Of constrained samples, by which they are of the adjusted ones."""
    words = {one.which: adjusted.params[one.which].bad_words for one in adjusted.constrained}
    return {which: own for which, own in words.items() if own}


def _bad_words(params: Sequence[SamplingParams]) -> NDArray[np.int32]:
    words = [own.bad_words or () for own in params]
    longest = max((len(word) for own in words for word in own), default=0)
    table = np.full((len(params), max(map(len, words), default=0), longest), NO_ID, np.int32)
    for row, own in zip(table, words, strict=True):
        for entry, word in zip(row, own, strict=False):
            entry[longest - len(word) :] = word
    return table


def _doubled(size: int, wanted: int) -> int:
    while size < wanted:
        size *= 2
    return size
