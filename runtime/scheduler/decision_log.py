"""Every decision of a scheduler in a file, without a word of text, to be decided again elsewhere."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from ...common.errors import ConfigError, shown
from ..kv_cache.manager import KVCacheManager
from ..kv_cache.prefix_cache import Chain
from ..protocol.engine_output import FinishReason
from ..protocol.scheduler_output import ON_HOST, Ints, Reports, SchedulerOutput
from .config import SchedulerConfig
from .request import Request
from .running_batch import yields_one_each
from .scheduler import Scheduler

FORMAT = 3


class RecordingScheduler(Scheduler):
    """A scheduler that writes down what happens to it and what it decides: one JSON object a line.

    Of tokens only their number is written, and of each full block of them which one it is, in the order in
    which blocks of other contents were first seen: who shares with whom, but not what.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager, file: TextIO) -> None:
        super().__init__(config, kv_cache)
        self._file = file
        self._encoder = PlanEncoder()
        self._numbers: dict[bytes, int] = {}
        self._kept: dict[
            str, list[int]
        ] = {}  # of live requests, blocks that others can find since the last line
        cache = {
            "num_blocks": kv_cache.pool.num_blocks,
            "block_size": kv_cache.block_size,
            "prefix_cache": kv_cache.prefix is not None,
            "window": kv_cache.window,
            "sides": kv_cache.windows[1:],
            "swap_slots": kv_cache.swap.num_slots if kv_cache.swap else 0,
        }
        self._write({"lamina": FORMAT, "limits": asdict(config), "cache": cache})

    def add(self, request: Request) -> None:
        """Queue a request; it may grow as far as the context and the whole cache allow."""
        super().add(request)
        self._write(
            {
                "add": request.request_id,
                "prompt": len(request.prompt_token_ids),
                "limit": request.max_total_tokens,
                "min_tokens": request.params.min_tokens,
                "seed": request.params.seed,
                "priority": request.priority,
                "queued": request.times.queued,
                "blocks": self._blocks(request, len(request.prompt_token_ids)),
            }
            | ({} if request.params.prompt_logprobs is None else {"prompt_logprobs": True})
        )

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a live request and give back its blocks: now, or after the last step that may write them."""
        request = self._requests[request_id]
        blocks = self._blocks(request, request.num_tokens)
        super().finish(request_id, reason, stop_reason)
        self._write({"finish": request_id, "reason": reason, "blocks": blocks})

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None where nothing can be done before a step in flight is over, or at all."""
        plan = super().schedule()
        self._write(self._encoder.encode(plan))
        return plan

    def update(
        self,
        plan: SchedulerOutput,
        sampled: Sequence[int] | NDArray[np.int32],
        reports: Reports | None = None,
        num_sampled: Ints | None = None,
    ) -> list[Request]:
        """Take in the tokens of the oldest step in flight, row after row; returns who got any."""
        received = super().update(plan, sampled, reports, num_sampled)
        ended = [request for request in received if request.finish_reason is not None]
        said: dict[str, Any] = {"update": plan.step}
        if ended:
            said["ended"] = {r.request_id: r.finish_reason for r in ended}
            said["blocks"] = {r.request_id: self._blocks(r, r.num_tokens) for r in ended}
        self._write(said)
        return received

    def discard(self, plan: SchedulerOutput) -> None:
        """Treat a step that failed, and all launched after it, as never begun."""
        super().discard(plan)
        self._write({"discard": plan.step})

    def reopen(self, *, without: Request | None = None, launched: int = 0) -> None:
        """Open the books anew, whatever state an interrupt or an error left them in.

        Of the call that it came in no line may have been written, so this one says where requests stand.
        """
        super().reopen(without=without, launched=launched)
        self._encoder = PlanEncoder()
        live = [*self._waiting]
        said = {"reopen": {r.request_id: [len(r.output_token_ids), r.num_reported] for r in live}}
        self._kept = {r.request_id: self._blocks(r, r.num_tokens) for r in live}
        self._write(said | {"launched": self._in_flight.num_launched})

    def _give_back(self, request: Request) -> None:
        super()._give_back(request)
        self._keep(request)

    def _release(self, request: Request, num_computed: int, step: int) -> None:
        super()._release(request, num_computed, step)
        self._keep(request)

    def _keep(self, request: Request) -> None:
        """Note an answer that is not at its end, as others find what its request has given back."""
        if request.finish_reason is None:
            self._kept[request.request_id] = self._blocks(request, request.num_tokens)

    def _blocks(self, request: Request, num_tokens: int) -> list[int]:
        """Which full blocks a request's first tokens make; nothing where nobody could find them."""
        cache = self._kv_cache.prefix
        if cache is None:
            return []
        chain = Chain(request.cache_salt, request.token_bytes)
        chain.hash(num_tokens // cache.block_size, cache)
        return [self._numbers.setdefault(digest, len(self._numbers)) for digest in chain.digests]

    def _write(self, said: dict[str, Any]) -> None:
        kept, self._kept = self._kept, {}
        if kept:
            self._write({"kept": kept})
        self._file.write(json.dumps(said, separators=(",", ":")) + "\n")


class PlanEncoder:
    """Plans as plain data, less what follows from the plan before: a step like the last one is its number."""

    def __init__(self) -> None:
        self._rows: tuple[str, ...] = ()
        self._expected: list[int] = []  # tokens computed of each row, if the same rows come again

    def encode(self, plan: SchedulerOutput | None) -> dict[str, Any]:
        """What a plan decides."""
        if plan is None:
            return {"plan": None}
        said: dict[str, Any] = {"plan": plan.step}
        counts, computed = plan.num_scheduled_tokens.tolist(), plan.num_computed_tokens.tolist()
        if plan.request_ids != self._rows:
            said["rows"] = plan.request_ids
        if plan.request_ids != self._rows or computed != self._expected:
            said["computed"] = computed
        if plan.num_tokens != plan.num_rows:
            said["counts"] = counts
        if not yields_one_each(plan.num_sampled_tokens):
            said["sampled"] = plan.num_sampled_tokens.tolist()
        on_host = plan.sources == ON_HOST
        if not np.array_equal(plan.sources, np.arange(plan.num_rows)):
            said["sources"] = "host" if on_host.all() else plan.sources.tolist()
        if plan.new_blocks.size:
            said["new_blocks"] = plan.new_blocks.T.tolist()
        for name, blocks in (("swap_out", plan.copies.swap_out), ("swap_in", plan.copies.swap_in)):
            if blocks:
                said[name] = [list(pair) for pair in blocks]
        if "rows" in said:
            said["seeds"] = plan.sampling["seed"].tolist()
        if plan.preempted_ids:
            said["preempted"] = plan.preempted_ids
        self._rows = plan.request_ids
        self._expected = (plan.num_computed_tokens + plan.num_scheduled_tokens).tolist()
        return json_form(said)


def json_form(said: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a file."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in said.items()}


def open_recording(path: str | Path) -> TextIO:
    """A new file, written line by line, so that a crash leaves all that came before it."""
    try:
        return Path(path).expanduser().open("w", buffering=1, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"record is {shown(str(path))}, which cannot be written: {error}") from error
