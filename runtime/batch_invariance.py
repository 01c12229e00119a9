"""The self-test of batch invariance: requests alone and in random mixes, with the same bits of logits."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.errors import ConfigError, LogitsError
from ..common.progress import Progress
from ..compiler.config import CompileConfig
from .batch_trace import first_difference
from .config import RuntimeConfig
from .protocol.engine_request import EngineRequest
from .protocol.scheduler_output import SchedulerOutput
from .sampling_params import SamplingParams
from .startup import memory
from .startup.loaded import LoadedRuntime
from .startup.loader import load, resolve_runtime
from .startup.reload import keep_model, load_again
from .startup.resolved import ResolvedRuntime
from .verify import token_ids_of

LENGTHS = (1, 2, 15, 16, 17, 40, 65, 130, 257, 600)  # tokens of prompts of random ids
FEW_TOKENS = 6  # of an answer at most
# Where requests are to be preempted their prompts end so many tokens before a block does, and answers grow by
# more than a block: each is admitted with room for one.
BEFORE_THE_END, BLOCKS_OF_PROMPTS = 2, (1, 2, 3)
SIZES = (1, 2, 3, 7, 12, 32)  # requests of a mix
CROWDS = (8, 12)  # the same where they are preempted
ARRIVALS = 4  # steps in which they come
CHUNK = 17  # tokens of a prompt in a step, where prompts are cut
MOST_CHUNKS = 12  # of a prompt: where there were more, a step takes more tokens
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # of as many bytes as a logit

Place = tuple[int, int]  # a prompt's number, and the position of the token that logits follow


class Asked(NamedTuple):
    """A request of a mix."""

    prompt: int  # its number
    num_tokens: int
    arrival: int  # the step before which it is added
    salt: str  # of the prefix cache: of one that no other has nothing is found


class Variant(NamedTuple):
    """Settings under which some of the mixes run."""

    name: str
    changes: dict[str, Any]  # of RuntimeConfig
    num_tokens: tuple[int, int]  # of an answer, at least and at most
    sizes: tuple[int, ...] = SIZES
    percent: int = 88  # of all mixes
    are_preempted: bool = False  # of prompts that are made for that


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """Logits that have other bits than those of the request alone."""

    mix: str
    prompt: int
    position: int  # of the token that they follow
    num_ids: int  # how many of the logits differ
    largest: float  # difference


@dataclass(frozen=True, kw_only=True, slots=True)
class Invariance:
    """What `lamina verify --batch-invariant` found."""

    num_mixes: int
    num_requests: int
    num_logits: int  # rows of logits that were compared
    num_preemptions: int
    num_cached_tokens: int  # of prompts, found in the prefix cache
    variants: tuple[str, ...]
    mismatches: tuple[Mismatch, ...]  # the first of each request that has one
    first: str | None  # the call of the plan that is the first to give other bits, where there is a mismatch

    @property
    def is_right(self) -> bool:
        """Whether all bits were the same."""
        return not self.mismatches


def check_batch_invariance(
    config: RuntimeConfig,
    prompts: Sequence[str | Sequence[int]],
    num_mixes: int,
    progress: Progress,
    *,
    seed: int = 0,
) -> Invariance:
    """Compares logits of requests in random mixes with those of the same requests alone, bit for bit.

    prompts: texts or token ids; beside them there are some of random ids. The mixes run as `config` says,
    then with prompts cut and nothing captured, then with so few blocks that requests are preempted, until one
    shows other bits. The mode need not be on: what is found without it shows what it is for. Raises
    ConfigError where nothing is compiled, LogitsError where a request fails, and what loading raises.
    """
    if config.compile_config is None:
        raise ConfigError("compile is False; wanted True or a CompileConfig(batch_invariant=True)")
    config.parallel.require_one_rank("mixes are compared in one process")
    resolved = resolve_runtime(config, progress)
    chance, tokens = random.Random(seed), _Tokens.of(resolved)
    own = [tuple(ids[: resolved.max_model_len - tokens.of_few]) for ids in token_ids_of(resolved, prompts)]
    run = _Run([*own, *_random_prompts(resolved, tokens, chance)], tokens, chance)
    variants = _variants(resolved, max(map(len, run.prompts)), tokens)
    first, model = None, None
    for number, variant in enumerate(variants):
        progress("verify", number / len(variants), variant.name)
        changed = replace(config, **variant.changes)
        loaded = load(changed, progress) if model is None else load_again(model, changed, progress)
        try:
            model = keep_model(loaded)
            run.mixes(loaded, variant, max(1, num_mixes * variant.percent // 100))
            if run.mismatches:
                first = first_difference(loaded, run.prompts)
                break
        finally:
            loaded.core.close()
            del loaded
            _give_back(resolved.device)
    return run.found(variants, first)


class _Tokens(NamedTuple):
    """How many tokens answers have."""

    of_few: int  # at most
    of_preempted: int
    prompts: tuple[int, ...]  # lengths of those that end shortly before a block does

    @classmethod
    def of(cls, resolved: ResolvedRuntime) -> "_Tokens":
        size, room = resolved.block_size, resolved.max_model_len
        of_preempted = min(size + 3 * BEFORE_THE_END, room // 2)
        ends = (count * size - BEFORE_THE_END for count in BLOCKS_OF_PROMPTS)
        fitting = tuple(end for end in ends if 0 < end <= room - of_preempted)
        return cls(min(FEW_TOKENS, room // 2), of_preempted, fitting or (room - of_preempted,))


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _random_prompts(
    resolved: ResolvedRuntime, tokens: _Tokens, chance: random.Random
) -> list[tuple[int, ...]]:
    """Of several lengths, the last those to be preempted; every second one begins as the longest does."""
    vocab, longest = resolved.model.vocab_size, resolved.max_model_len - tokens.of_few
    lengths = [*(length for length in LENGTHS if length <= longest), *tokens.prompts]
    base = [chance.randrange(vocab) for _ in range(max(lengths))]
    return [
        tuple(base[:length] if number % 2 else (chance.randrange(vocab) for _ in range(length)))
        for number, length in enumerate(lengths)
    ]


def _variants(resolved: ResolvedRuntime, longest: int, tokens: _Tokens) -> tuple[Variant, ...]:
    """The caller's settings, then others that must not show."""
    config = resolved.config
    compiled = config.compile_config
    assert isinstance(compiled, CompileConfig)
    uncaptured = replace(compiled, cuda_graphs="off")
    chunk = max(CHUNK, longest // MOST_CHUNKS | 1)
    blocks = -(-(max(tokens.prompts) + tokens.of_preempted) // resolved.block_size)
    enough = (blocks + blocks // 2 + 1) * len(memory.layer_groups(resolved.model))  # for one, not for two
    return (
        Variant("as configured", {}, (1, tokens.of_few)),
        Variant(
            f"prompts in chunks of {chunk}, nothing captured",
            {"prefill_chunk": chunk, "compile": uncaptured},
            (1, tokens.of_few),
            percent=10,
        ),
        Variant(
            "too few blocks for all",
            {"num_kv_blocks": enough + 2, "max_num_seqs": min(resolved.max_num_seqs, max(CROWDS))},
            (tokens.of_preempted, tokens.of_preempted),
            CROWDS,
            2,
            are_preempted=True,
        ),
    )


class _Run:
    """Mixes of requests, and what became of them so far."""

    def __init__(self, prompts: Sequence[tuple[int, ...]], tokens: _Tokens, chance: random.Random) -> None:
        self.prompts = prompts
        self._tokens = tokens
        self.mismatches: list[Mismatch] = []
        self._chance = chance
        self._alone: dict[Place, Tensor] = {}
        self._num_mixes = self._num_requests = self._num_logits = 0
        self._num_preemptions = self._num_cached_tokens = 0

    def mixes(self, loaded: LoadedRuntime, variant: Variant, count: int) -> None:
        """Run so many; before the first of all, each request alone."""
        if not self._alone:
            for prompt in range(len(self.prompts)):
                longest = self._tokens.of_preempted if prompt in self._preempted else self._tokens.of_few
                self._run(loaded, [Asked(prompt, longest, 0, f"alone {prompt}")], self._keep)
        for _ in range(count):
            self._num_mixes += 1
            mix = self._mix(variant)
            self._run(loaded, mix, partial(self._compare, f"{self._num_mixes}, {variant.name}"))

    def found(self, variants: Sequence[Variant], first: str | None) -> Invariance:
        return Invariance(
            num_mixes=self._num_mixes,
            num_requests=self._num_requests,
            num_logits=self._num_logits,
            num_preemptions=self._num_preemptions,
            num_cached_tokens=self._num_cached_tokens,
            variants=tuple(variant.name for variant in variants),
            mismatches=tuple(self.mismatches),
            first=first,
        )

    @property
    def _preempted(self) -> range:
        """The numbers of the prompts that are made to be."""
        return range(len(self.prompts) - len(self._tokens.prompts), len(self.prompts))

    def _mix(self, variant: Variant) -> list[Asked]:
        chance = self._chance
        prompts = self._preempted if variant.are_preempted else range(len(self.prompts))
        return [
            Asked(
                prompt=chance.choice(prompts),
                num_tokens=chance.randint(*variant.num_tokens),
                arrival=chance.randrange(ARRIVALS),
                salt=chance.choice(("", f"{self._num_mixes} {number}")),
            )
            for number in range(chance.choice(variant.sizes))
        ]

    def _run(
        self, loaded: LoadedRuntime, mix: Sequence[Asked], take: Callable[[dict[Place, list[Tensor]]], None]
    ) -> None:
        """All requests of a mix, and their logits to `take` once they have ended."""
        core, seen = loaded.core, _Seen(mix)
        loaded.runner.on_logits = seen
        try:
            for step in range(ARRIVALS):
                for number, asked in enumerate(mix):
                    if asked.arrival == step:
                        core.add(self._request(str(number), asked))
                core.step()
            while core.has_work:
                core.step()
        finally:
            loaded.runner.on_logits = None
        while core.outputs:
            finish = core.outputs.popleft().finish
            if finish is not None:
                if finish.error is not None:
                    raise LogitsError(f"a request of the self-test failed: {finish.error}") from finish.error
                self._num_preemptions += finish.num_preemptions
                self._num_cached_tokens += finish.num_cached_tokens
        self._num_requests += len(mix)
        take(seen.rows)

    def _request(self, name: str, asked: Asked) -> EngineRequest:
        ids = self.prompts[asked.prompt]
        return EngineRequest(
            request_id=name,
            prompt_token_ids=ids,
            params=SamplingParams(temperature=0.0, max_tokens=asked.num_tokens).resolve(None, seed=0),
            max_total_tokens=len(ids) + asked.num_tokens,
            cache_salt=asked.salt,
        )

    def _keep(self, found: dict[Place, list[Tensor]]) -> None:
        self._alone |= {place: rows[0] for place, rows in found.items()}

    def _compare(self, mix: str, found: dict[Place, list[Tensor]]) -> None:
        """All rows at once: the host waits for the device a single time."""
        places = [place for place in sorted(found) for _ in found[place]]
        rows = torch.stack([row for place in sorted(found) for row in found[place]])
        right = torch.stack([self._alone[place] for place in places])
        differs = (_bits(rows) != _bits(right)).any(1).tolist()
        self._num_logits += len(places)
        for number, place in enumerate(places):
            if differs[number] and not any(one[:2] == (mix, place[0]) for one in self._named()):
                self._note_mismatch(mix, place, rows[number])

    def _note_mismatch(self, mix: str, place: Place, row: Tensor) -> None:
        right = self._alone[place]
        differs = _bits(row) != _bits(right)
        self.mismatches.append(
            Mismatch(
                mix=mix,
                prompt=place[0],
                position=place[1],
                num_ids=int(differs.sum()),
                largest=float((row.double() - right.double()).abs()[differs].max()),
            )
        )

    def _named(self) -> list[tuple[str, int]]:
        return [(one.mix, one.prompt) for one in self.mismatches]


class _Seen:
    """Collects the logits of a mix by prompt and position."""

    def __init__(self, mix: Sequence[Asked]) -> None:
        self.rows: dict[Place, list[Tensor]] = {}
        self._prompts = [asked.prompt for asked in mix]

    def __call__(self, plan: SchedulerOutput, logits: Tensor) -> None:
        kept, sample = logits[: plan.num_samples].clone(), 0  # a capture writes into the same memory again
        ends = plan.num_computed_tokens + plan.num_scheduled_tokens
        for row, request_id in enumerate(plan.request_ids):
            if plan.num_sampled_tokens[row]:
                first = int(ends[row] - plan.num_sampled_tokens[row])  # others may follow a wrong draft
                self.rows.setdefault((self._prompts[int(request_id)], first), []).append(kept[sample])
            sample += int(plan.num_sampled_tokens[row])


def _bits(row: Tensor) -> Tensor:
    return row.view(INTEGERS[row.element_size()])
