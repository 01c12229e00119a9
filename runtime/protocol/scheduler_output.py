"""One step, as plain data that another process could receive."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..pooling_params import PoolingParams
from ..sampling_params import SamplingParams
from .plain_data import PlainData

if TYPE_CHECKING:
    Ints = NDArray[np.int64]
    Flags = NDArray[np.bool_]
    TokenIds = NDArray[np.int32]
    SamplingRows = NDArray[np.void]  # of SAMPLING
    Params = tuple[SamplingParams, ...]
else:  # as msgspec reads them: it knows arrays by their class alone, and parameters travel beside a plan
    Ints = Flags = TokenIds = SamplingRows = np.ndarray
    Params = tuple

Banned = tuple[tuple[int, tuple[int, ...]], ...]  # (sample, ids it must not be)

ON_HOST = -1  # the source of a token that the host knows
NO_DRAFTS = -1  # the source of fillers
DRAFTS_ON_HOST = -2  # the source of drafts whose ids are among the plan's tokens
NO_ADAPTER = -1  # the slot of rows, and of tokens, without one
NULL_BLOCK = 0  # stands in padding of block tables; never handed out, never written

# What a row is sampled with; unresolved or out of range is nothing here.
SAMPLING = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.int64),
    ]
)


class Copies(NamedTuple):
    """Blocks that move between the cache and the host, before the step reads or writes anything else.

    All that go out are read before any that come in are written, as a block may be on both lists, and a slot
    too.
    """

    swap_out: tuple[tuple[int, int], ...]  # (block, slot of host memory)
    swap_in: tuple[tuple[int, int], ...]  # (slot, block)


NO_COPIES = Copies((), ())


class TokenLogprobs(NamedTuple):
    """The log-probabilities of a token and of the likeliest ones in its place."""

    token_ids: tuple[int, ...]  # the token, then the likeliest in order
    logprobs: tuple[float, ...]
    rank: int  # of the token itself, from 1 on


class WantedLogprobs(PlainData, frozen=True, kw_only=True):
    """Which log-probabilities a step is to report: of its samples, and of tokens of prompts."""

    num_top: int  # likeliest tokens beside each, as many as anyone wants
    samples: Ints  # [a] which of the step's samples
    before: Ints  # [b] which of the step's tokens come before a token of a prompt that is to be reported
    targets: TokenIds  # [b] that token
    spans: tuple[tuple[int, int], ...] = ()  # (row, how many of its tokens these are), in order


class WantedPooling(PlainData, frozen=True, kw_only=True):
    """Whose hidden states of a step are pooled: rows of requests that want no tokens.

    Where such a row ends its prompt it counts as one that samples: its result takes the place of the token,
    which means nothing.
    """

    rows: Ints  # [p] in order
    are_last: Flags  # [p] whether the row's prompt ends with this step
    params: tuple[PoolingParams, ...]  # [p]


class StepLogprobs(PlainData, frozen=True, kw_only=True):
    """The log-probabilities that a step was to report, in the order of WantedLogprobs."""

    samples: tuple[TokenLogprobs, ...]
    prompts: tuple[TokenLogprobs, ...]


class TokenHistory(PlainData, frozen=True, kw_only=True):
    """A request's tokens, all of them known to the host, for its own logits processors."""

    which: int  # of the adjusted samples
    request_id: str
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


class Constrained(NamedTuple):
    """An adjusted sample of a request with a grammar, which the worker knows by its id."""

    which: int  # of the adjusted samples
    row: int
    request_id: str
    num_output: int  # tokens of the output before this sample, on the device or the host; the least
    may_jump: bool = False  # whether tokens that the grammar alone decides may come without a sample
    # That follow the newest token in the row, and may not hold: the samples after this one are of them. The
    # worker alone knows them, as it does how many of the step before held.
    drafts: tuple[int, ...] = ()


class Adjusted(PlainData, frozen=True, kw_only=True):
    """Samples whose logits are adjusted before a token is chosen, by the tokens that come before.

    The device keeps the tokens of each in a slot. It appends the newest itself, as a row samples, and the
    drafts that come after it, of which the samples are a row's next ones. It is sent
    those that it has missed, which for a request without a slot so far are all of them. A request with logits
    processors is named in `histories`; the worker knows the processors by its id.
    """

    samples: Ints  # [n] which of the step's samples
    params: Params  # resolved, one a sample, without logits processors
    num_prompt: Ints  # [n]
    slots: Ints  # [n]
    missed: tuple[tuple[int, int, tuple[int, ...]], ...]  # (slot, position of the first, tokens)
    longest: int  # tokens that any of them has
    histories: tuple[TokenHistory, ...] = ()  # of those with logits processors
    constrained: tuple[Constrained, ...] = ()  # those with a grammar


class Drafts(PlainData, frozen=True, kw_only=True):
    """What a step is told of draft tokens, where the runtime has a drafter.

    Ids of drafts are the device's: those that the step before left for the row that its request had there.
    Of a pipeline, whose first stage has none of them, they are among the plan's tokens. Rows without any
    compute fillers in their place, which never hold, so that all rows have equally many.
    """

    # [num_rows] the row of the step before whose drafts follow the newest token, DRAFTS_ON_HOST or NO_DRAFTS
    sources: Ints
    capacities: Ints  # [num_rows] tokens that its blocks have room for: one from there on is written nowhere
    limits: Ints  # [num_rows] tokens that its request may have: a draft that would be the last cannot hold
    num_next: int  # drafts of each row that the step leaves for the next one, 0 for none


class AdapterLoad(NamedTuple):
    """An adapter that is to lie in a slot of the device before the step reads it."""

    slot: int
    digest: str  # of its bytes


class StepAdapters(PlainData, frozen=True, kw_only=True):
    """Which adapter each row is computed with, by the slot in which it lies."""

    slots: Ints  # [num_rows], NO_ADAPTER of rows without one
    loads: tuple[AdapterLoad, ...]  # before the step


class SchedulerOutput(PlainData, frozen=True, kw_only=True):
    """What a step computes: one row a request, in no order, and what is new in their block tables.

    A row's tokens are the ones after those already computed; where it samples, they are the last there are,
    and all but the first of `num_sampled_tokens` are drafts. Such a row yields at least one token, and one
    more for each draft that holds, so never more than it computes. Samples come row after row.
    Its newest token may still be on the device: then row `sources` of the step before has sampled it. How
    many tokens that row has computed is known to the device then, and `num_computed_tokens` is the least.
    A request keeps its row while it can, so of tables only what is new is sent: all of one in another row.
    """

    step: int
    request_ids: tuple[str, ...]
    num_scheduled_tokens: Ints  # [num_rows] tokens to compute, at least 1
    num_computed_tokens: Ints  # [num_rows] tokens computed by earlier steps, without drafts not yet judged
    token_ids: TokenIds  # [num_tokens], any id where the token is on the device, as most drafts are
    sources: Ints  # [num_rows] the row of the step before that sampled the row's newest token, or ON_HOST
    num_sampled_tokens: Ints  # [num_rows] tokens that the row yields at most
    sampling: SamplingRows  # [num_samples]
    banned: Banned = ()
    adjusted: Adjusted | None = None
    # [3, num_new] rows, columns and block ids of block table entries to set; after all rows of a KV-cache
    # group, max_num_seqs of them, come those of the next.
    new_blocks: Ints
    copies: Copies = NO_COPIES
    preempted_ids: tuple[str, ...] = ()  # since the plan before; some may have been admitted again
    wanted_logprobs: WantedLogprobs | None = None  # None where nobody wants any
    pooling: WantedPooling | None = None  # None where nobody pools
    drafts: Drafts | None = None  # None where nobody drafts
    adapters: StepAdapters | None = None  # None where no row has one

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.num_scheduled_tokens)

    @property
    def num_samples(self) -> int:
        return len(self.sampling)

    @property
    def is_drawn(self) -> bool:
        """Whether any sample is a token, not just the place of a result that was pooled."""
        return self.pooling is None or int(np.count_nonzero(self.pooling.are_last)) < len(self.sampling)

    @property
    def is_greedy(self) -> bool:
        """Whether every sample is the likeliest id, and nothing else is asked of any logits."""
        asks = self.adjusted, self.wanted_logprobs, self.pooling
        return not any(one is not None for one in asks) and not self.sampling["temperature"].any()

    @property
    def is_decode(self) -> bool:
        """Whether every row computes one token and samples one, as most steps do."""
        return len(self.token_ids) == len(self.num_scheduled_tokens) == len(self.sampling)

    @property
    def query_len(self) -> int:
        """Tokens that every row computes and samples; 0 where they differ, or a row samples fewer."""
        tokens, rows = len(self.token_ids), len(self.num_scheduled_tokens)
        if tokens != len(self.sampling) or tokens % max(rows, 1):
            return 0
        each = tokens // max(rows, 1)
        return each if (self.num_sampled_tokens == each).all() else 0

    @property
    def sample_rows(self) -> Ints:
        """The row of each sample [num_samples]."""
        return np.repeat(np.arange(self.num_rows), self.num_sampled_tokens)


def no_requests() -> SchedulerOutput:
    """A step of padding alone."""
    none = np.zeros(0, np.int64)
    return SchedulerOutput(
        step=0,
        request_ids=(),
        num_scheduled_tokens=none,
        num_computed_tokens=none,
        token_ids=np.zeros(0, np.int32),
        sources=none,
        num_sampled_tokens=none,
        sampling=np.zeros(0, SAMPLING),
        new_blocks=np.zeros((3, 0), np.int64),
    )


LARGEST_TOP_K = 2**31 - 1
SamplingRow = tuple[float, int, float, float, int]


def sampling_row(params: SamplingParams) -> SamplingRow:
    """Resolved parameters as a row of SAMPLING."""
    values: tuple[Any, ...] = params.temperature, params.top_k, params.top_p, params.min_p, params.seed
    assert None not in values, "unresolved parameters"
    temperature, top_k, top_p, min_p, seed = values
    return temperature, min(max(top_k, 0), LARGEST_TOP_K), top_p, min_p, seed
