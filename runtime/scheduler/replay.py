"""A decision log replayed: the same requests, the same ends, and every decision compared. No model runs."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...common.errors import LaminaError, LoadError
from ..kv_cache.block_pool import BlockPool
from ..kv_cache.manager import KVCacheManager
from ..pooling_params import PoolingParams
from ..protocol.runner_output import RunnerOutput
from ..protocol.scheduler_output import SchedulerOutput
from ..sampling_params import SamplingParams
from .config import SchedulerConfig
from .decision_log import COUNTS, FORMAT, PlanEncoder
from .request import Request
from .scheduler import Scheduler

Said = dict[str, Any]
STOP = 2**31 - 1  # a token that nothing else stands for


@dataclass(kw_only=True, slots=True)
class Replay:
    """What became of a decision log; the difference names the first decision that came out otherwise."""

    num_requests: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_hit_tokens: int = 0
    difference: str | None = None


@dataclass(slots=True)
class _Logged:
    """What stands for the tokens of a request of the log."""

    number: int
    blocks: list[int]
    block_size: int
    request: Request = field(init=False)
    last: int = -1  # position of a token that stops it

    def token(self, position: int) -> int:
        """Equal in equal blocks; elsewhere the request's own. No two of a request are equal but such ones."""
        index, offset = divmod(position, self.block_size)
        if index < len(self.blocks):
            return self.blocks[index] * self.block_size + offset
        return STOP if position == self.last else -1 - self.number


def replay(path: str | Path) -> Replay:
    """Decide again what a decision log has, up to the first decision that differs.

    Raises LoadError for a file that is no decision log.
    """
    lines = _read(path)
    header = lines[0][1]
    try:
        player = _Player(header, [said for _, said in lines[1:]])
    except (KeyError, TypeError, LaminaError) as error:
        raise LoadError(f"{path}: the first line is not that of a decision log: {error!r}") from error
    for number, said in lines[1:]:
        try:
            difference = player.play(said)
        except (AssertionError, KeyError) as error:
            difference = f"{type(error).__name__}: {error}"
        if difference is not None:
            player.result.difference = f"line {number}, {json.dumps(said)[:200]}: {difference}"
            break
    return player.finished()


class _Player:
    """A scheduler on an empty cache, led through what was logged."""

    def __init__(self, header: Said, lines: list[Said]) -> None:
        cache = header["cache"]
        self.block_size = cache["block_size"]
        kv_cache = KVCacheManager(
            BlockPool(cache["num_blocks"]),
            self.block_size,
            prefix_cache=cache["prefix_cache"],
            windows=cache["windows"],
            swap_slots=cache["swap_slots"],
        )
        self.now = 0.0
        self.scheduler = Scheduler(SchedulerConfig(**header["limits"]), kv_cache, clock=lambda: self.now)
        self.result = Replay()
        self._encoder = PlanEncoder()
        self._plans: dict[int, SchedulerOutput] = {}
        self._requests: dict[str, _Logged] = {}
        self._blocks = _last_blocks(lines)

    def play(self, said: Said) -> str | None:
        """Let one line happen; returns what came out otherwise."""
        if "add" in said:
            self._add(said)
        elif "finish" in said:
            self.scheduler.finish(said["finish"], said["reason"])
        elif "plan" in said:
            return self._schedule(said)
        elif "update" in said:
            return self._update(said)
        elif "discard" in said:
            self.scheduler.discard(self._plans[said["discard"]])
        elif "reopen" in said:
            self._reopen(said)
        elif "committed" in said:
            pass  # the blocks are known from the beginning
        else:
            return "no event of this name is known"
        return None

    def finished(self) -> Replay:
        """The result, with its figures."""
        self.result.num_preemptions = self.scheduler.num_preemptions
        self.result.num_hit_tokens = self.scheduler.num_hit_tokens
        return self.result

    def _add(self, said: Said) -> None:
        self.now = said["queued"]
        number = self.result.num_requests
        logged = _Logged(number, self._blocks.get(number, []), self.block_size)
        params = SamplingParams(
            min_tokens=said["min_tokens"],
            seed=said["seed"],
            prompt_logprobs=0 if said.get("prompt_logprobs") else None,
            presence_penalty=1.0 if said.get("adjusts") else 0.0,
        ).resolve(None, seed=0)
        logged.request = Request(
            request_id=said["add"],
            prompt_token_ids=tuple(map(logged.token, range(said["prompt"]))),
            params=params,
            stop_token_ids=frozenset({STOP} if said.get("stops") else ()),
            max_total_tokens=said["limit"],
            priority=said["priority"],
            pooling=_pooling_of(said),
            adapter=said.get("adapter"),
        )
        self._requests[said["add"]] = logged
        self.scheduler.add(logged.request)
        self.result.num_requests += 1

    def _reopen(self, said: Said) -> None:
        """Have each request stand where the logged one stood, which half a step may have changed."""
        for name, logged in self._requests.items():
            request, place = logged.request, said["reopen"].get(name)
            if place is None and request.finish_reason is None and name in self.scheduler.live_ids:
                self.scheduler.abort(name)
            elif place is not None:
                num_prompt, num_output = len(request.prompt_token_ids), place[0]
                tokens = range(num_prompt, num_prompt + num_output)
                request.output_token_ids[:] = map(logged.token, tokens)
                request.num_reported = place[1]
        self.scheduler.reopen(launched=said["launched"])
        self._encoder = PlanEncoder()

    def _schedule(self, said: Said) -> str | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self._plans[plan.step] = plan
            self.result.num_steps += 1
        return _difference(said, self._encoder.encode(plan))

    def _update(self, said: Said) -> str | None:
        plan = self._plans.pop(said["update"])
        ended, num_forced = said.get("ended", {}), said.get("forced", {})
        counts: dict[str, Any] = {name: np.array(said[name], np.int64) for name in COUNTS if name in said}
        num_yielded = counts.get("num_sampled", plan.num_sampled_tokens)
        sampled: list[int] = []
        forced = {}
        for row in num_yielded.nonzero()[0].tolist():
            name, count = plan.request_ids[row], int(num_yielded[row])
            logged, first = self._requests[name], self._first_position(plan, row)
            last = first + count - 1 + num_forced.get(name, 0)
            if ended.get(name) == "stop":
                logged.last = said.get("num_tokens", {}).get(name, last + 1) - 1
                logged.request.stop_token_ids = frozenset({logged.token(logged.last)})
            sampled += map(logged.token, range(first, first + count))
            forced[name] = tuple(map(logged.token, range(first + count, last + 1)))
        output = RunnerOutput(token_ids=np.array(sampled, np.int32), forced=forced, **counts)
        received = self.scheduler.update(plan, output)
        found = {r.request_id: r.finish_reason for r in received if r.finish_reason is not None}
        return _difference({"ended": ended}, {"ended": found})

    def _first_position(self, plan: SchedulerOutput, row: int) -> int:
        """Where the first token stands that a row yields: with drafts only the host's count says so."""
        if plan.drafts is not None:
            return self._requests[plan.request_ids[row]].request.num_tokens
        return int(plan.num_computed_tokens[row] + plan.num_scheduled_tokens[row])


def _pooling_of(said: Said) -> PoolingParams | None:
    if not said.get("pools"):
        return None
    return PoolingParams(pooling="mean" if said.get("pools_all") else "last")


def _last_blocks(lines: list[Said]) -> dict[int, list[int]]:
    """Of each request, by its number, the blocks it had in the end, or when others last could find some."""
    blocks: dict[int, list[int]] = {}
    numbers: dict[str, int] = {}
    for said in lines:
        if "add" in said:
            numbers[said["add"]] = len(blocks)
            blocks[len(blocks)] = said["blocks"]
        elif "finish" in said:
            blocks[numbers[said["finish"]]] = said["blocks"]
        elif "committed" in said or "update" in said:
            for name, own in (said.get("committed") or said.get("blocks") or {}).items():
                blocks[numbers[name]] = own
    return blocks


def _difference(logged: Said, decided: Said) -> str | None:
    """The first field in which two decisions differ."""
    for name in [*logged, *(name for name in decided if name not in logged)]:
        if logged.get(name) != decided.get(name):
            return f"{name} was {logged.get(name)}, is now {decided.get(name)}"
    return None


def _read(path: str | Path) -> list[tuple[int, Said]]:
    """Lines with their numbers; a last one that is cut off, as by a crash, is left out."""
    try:
        texts = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
    lines = list(_parsed(path, texts))
    if not lines or lines[0][1].get("lamina") != FORMAT:
        raise LoadError(f"{path} is no decision log of format {FORMAT}; RuntimeConfig.record writes them")
    return lines


def _parsed(path: str | Path, texts: list[str]) -> Iterator[tuple[int, Said]]:
    for number, text in enumerate(texts, start=1):
        try:
            said = json.loads(text)
        except ValueError as error:
            if number == len(texts):
                return
            raise LoadError(f"{path}, line {number} is no JSON: {error}") from error
        if not isinstance(said, dict):
            raise LoadError(f"{path}, line {number} is {text[:80]}; wanted a JSON object")
        yield number, said
