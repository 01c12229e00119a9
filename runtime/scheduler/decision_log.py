"""The decision log: every decision of a scheduler in a file, without a word of text, to be replayed."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ...common.errors import ConfigError, shown
from ..kv_cache.manager import KVCacheManager
from ..kv_cache.prefix_cache import Chain, PrefixCache
from ..protocol.runner_output import RunnerOutput
from ..protocol.scheduler_output import ON_HOST, SchedulerOutput
from .config import SchedulerConfig
from .request import Request

FORMAT = 4
COUNTS = ("num_sampled", "num_drafted", "num_proposed")  # of a runner's output, which steps depend on


class DecisionLog:
    """A listener that writes down what happens to a scheduler and what it decides: one JSON object a line.

    Of tokens only their number is written, and of each full block of them which one it is, in the order in
    which blocks of other contents were first seen: who shares with whom, but not what.
    """

    def __init__(self, file: TextIO) -> None:
        """Write to a file that is open for text; whoever opened it closes it."""
        self._file = file
        self._encoder = PlanEncoder()
        self._prefix_cache: PrefixCache | None = None
        self._numbers: dict[bytes, int] = {}
        # Of live requests, blocks that were committed since the last line.
        self._committed: dict[str, list[int]] = {}

    def on_start(self, config: SchedulerConfig, kv_cache: KVCacheManager) -> None:
        """See Listener."""
        self._prefix_cache = kv_cache.prefix
        cache = {
            "num_blocks": kv_cache.pool.num_blocks,
            "block_size": kv_cache.block_size,
            "prefix_cache": kv_cache.prefix is not None,
            "windows": kv_cache.windows,
            "swap_slots": kv_cache.swap.num_slots if kv_cache.swap else 0,
        }
        self._write({"lamina": FORMAT, "limits": asdict(config), "cache": cache})

    def on_add(self, request: Request) -> None:
        """See Listener."""
        said = {
            "add": request.request_id,
            "prompt": len(request.prompt_token_ids),
            "limit": request.max_total_tokens,
            "min_tokens": request.params.min_tokens,
            "seed": request.params.seed,
            "priority": request.priority,
            "queued": request.times.queued,
            "blocks": self._blocks(request, len(request.prompt_token_ids)),
        }
        if request.adapter is not None:
            said["adapter"] = request.adapter
        facts = {  # that decide how many tokens it computes at once
            "prompt_logprobs": request.params.prompt_logprobs is not None,
            "adjusts": request.adjusts,
            "pools": request.pooling is not None,
            "pools_all": request.pooling is not None and not request.pooling.reuses_prefix,
            "stops": bool(request.params.min_tokens and request.stop_token_ids),
        }
        self._write(said | {name: True for name, holds in facts.items() if holds})

    def on_finish(self, request: Request) -> None:
        """See Listener."""
        blocks = self._blocks(request, request.num_tokens)
        self._write({"finish": request.request_id, "reason": request.finish_reason, "blocks": blocks})

    def on_schedule(self, plan: SchedulerOutput | None) -> None:
        """See Listener."""
        self._write(self._encoder.encode(plan))

    def on_update(
        self,
        plan: SchedulerOutput,
        output: RunnerOutput,
        received: Sequence[Request],
        num_forced: Mapping[Request, int],
    ) -> None:
        """See Listener."""
        ended = [request for request in received if request.finish_reason is not None]
        said: dict[str, Any] = {"update": plan.step}
        for name in COUNTS:
            if (counts := getattr(output, name)) is not None:
                said[name] = counts.tolist()
        if num_forced:
            said["forced"] = {r.request_id: count for r, count in num_forced.items()}
        if ended:
            said["ended"] = {r.request_id: r.finish_reason for r in ended}
            said["blocks"] = {r.request_id: self._blocks(r, r.num_tokens) for r in ended}
            if plan.drafts is not None:  # tokens after the one that ends it are not said
                said["num_tokens"] = {r.request_id: r.num_tokens for r in ended}
        self._write(said)

    def on_commit(self, request: Request) -> None:
        """See Listener; of a request that has ended its end says so."""
        if request.finish_reason is None:
            self._committed[request.request_id] = self._blocks(request, request.num_tokens)

    def on_discard(self, plan: SchedulerOutput) -> None:
        """See Listener."""
        self._write({"discard": plan.step})

    def on_reopen(self, waiting: Sequence[Request], num_launched: int) -> None:
        """See Listener. The call that was interrupted may have no line, so this one says where all stand."""
        self._encoder = PlanEncoder()
        said = {"reopen": {r.request_id: [len(r.output_token_ids), r.num_reported] for r in waiting}}
        self._committed = {r.request_id: self._blocks(r, r.num_tokens) for r in waiting}
        self._write(said | {"launched": num_launched})

    def _blocks(self, request: Request, num_tokens: int) -> list[int]:
        """Which full blocks a request's first tokens make; nothing where nobody could find them."""
        cache = self._prefix_cache
        if cache is None:
            return []
        chain = Chain(request.cache_salt, request.token_bytes)
        chain.hash(num_tokens // cache.block_size, cache)
        return [self._numbers.setdefault(digest, len(self._numbers)) for digest in chain.digests]

    def _write(self, said: dict[str, Any]) -> None:
        committed, self._committed = self._committed, {}
        if committed:
            self._write({"committed": committed})
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
        if not (plan.num_sampled_tokens == 1).all():
            said["sampled"] = plan.num_sampled_tokens.tolist()
        on_host = plan.sources == ON_HOST
        if not np.array_equal(plan.sources, np.arange(plan.num_rows)):
            said["sources"] = "host" if on_host.all() else plan.sources.tolist()
        if plan.drafts is not None:
            said["drafts"] = {
                "sources": plan.drafts.sources.tolist(),
                "capacities": plan.drafts.capacities.tolist(),
                "limits": plan.drafts.limits.tolist(),
                "next": plan.drafts.num_next,
            }
        if plan.adapters is not None:
            loads = [list(load) for load in plan.adapters.loads]
            said["adapters"] = {"slots": plan.adapters.slots.tolist(), "loads": loads}
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


def open_decision_log(path: str | Path) -> TextIO:
    """A new file, written line by line, so that a crash leaves all that came before it.

    Raises ConfigError for a path that cannot be written.
    """
    try:
        return Path(path).expanduser().open("w", buffering=1, encoding="utf-8")
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of nobody
        raise _cannot_be_written(path, str(error)) from error


def check_decision_log(path: str | Path) -> None:
    """ConfigError for a path that open_decision_log would refuse, as far as can be told without a file made.

    Called before weights are read and workers started, which take longer than to find a misspelt folder.
    """
    try:
        file = Path(path).expanduser()
        if file.is_dir():
            raise _cannot_be_written(path, "it is a folder")
        if not file.parent.is_dir():
            raise _cannot_be_written(path, f"{file.parent} is no folder")
    except (OSError, RuntimeError) as error:
        raise _cannot_be_written(path, str(error)) from error
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise _cannot_be_written(path, "permission is denied")


def _cannot_be_written(path: str | Path, reason: str) -> ConfigError:
    return ConfigError(f"record is {shown(str(path))}, which cannot be written: {reason}")
