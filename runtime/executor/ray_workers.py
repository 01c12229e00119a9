"""Workers as actors of a Ray cluster, one a rank, in a placement group; what their executor sends and hears.

A message is a call of every actor. Answers come by a call that returns once there are any, of which one is
always open: it fails with the actor, which is how its end is known.
"""

import atexit
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from ...common.errors import EngineDeadError, EngineError, clipped, shown
from ...common.logging import get_logger
from ..protocol import wire
from ..protocol.core_messages import Shutdown
from .ray_actor import NUM_CALLS, Answers, Place, RankActor, version
from .ray_cluster import CLUSTER
from .workers import BEAT_SECONDS, SECONDS_TO_END, Receive, lost_workers

logger = get_logger("runtime")
SECONDS_TO_PLACE = 300.0  # for nodes to have room, which some clusters add when it is asked for
SECONDS_TO_START = 300.0
SECONDS_SILENT = (
    180.0  # without an answer, after which a worker counts as lost: builds may hold up its threads
)
SECONDS_TO_DIE = 10.0
_running: "set[RayWorkers]" = set()  # to be ended before the interpreter is


class _Link:
    """One worker: its actor, how many messages it was given, and the open call for its answers."""

    def __init__(self, rank: int, actor: Any) -> None:
        self.rank, self.actor = rank, actor
        self.place: Place | None = None  # once it runs
        self.num_given = 0
        self.ask(0)

    def ask(self, first: int) -> None:
        """Open a call for its answers from a number on."""
        self.asked = time.monotonic()
        self.call = self.actor.answers.remote(first)

    def give(self, number: int, frame: bytes) -> None:
        """Send it a message, unless it was sent."""
        if self.num_given <= number:
            self.actor.take.remote(number, frame)
            self.num_given = number + 1

    def name(self) -> str:
        """Which worker it is, for whoever has to look for it."""
        where = "" if self.place is None else f", process {self.place.pid} on {self.place.address},"
        return f"rank {self.rank}: its actor{where}"


class RayWorkers:
    """See Workers. An own cluster is ended with the last of its workers, any other is left as it was."""

    def __init__(
        self,
        num_workers: int,
        receive: Receive,
        *,
        num_cpus: int,
        num_gpus: int,
        placement: str,
        num_stages: int = 1,
    ) -> None:
        """num_cpus, num_gpus: of each; placement: how they lie on nodes, by Ray's name in small letters.

        num_stages: of several each is placed as one, so that its ranks are on one node. UnsupportedError
        where Ray is not installed, EngineDeadError where there is no cluster or no room on it, or an actor
        does not start; nothing is left of any then.
        """
        self.lost: EngineDeadError | None = None
        self.num_workers = num_workers
        self._receive, self._parent = receive, os.getpid()
        self._unsent: deque[tuple[int, bytes]] = deque()  # with their numbers; some may have been given them
        self._links: list[_Link] = []
        self._group: Any = None
        CLUSTER.join()
        self._ray: Any = import_module("ray")
        _end_with_interpreter()
        _running.add(self)
        try:
            each = {"CPU": num_cpus} | ({"GPU": num_gpus} if num_gpus else {})
            num_together = 1 if num_stages == 1 else num_workers // num_stages
            bundle = {kind: number * num_together for kind, number in each.items()}
            self._place(bundle, num_together, placement.upper())
            self._start(each, num_together)
        except BaseException:
            self.end(0)
            raise

    @property
    def pids(self) -> tuple[int | None, ...]:
        """See Workers."""
        return tuple(None if link.place is None else link.place.pid for link in self._links)

    def send(self, message: Any) -> None:
        """See Workers."""
        self.check()
        frame = wire.encode(message)
        number = self._unsent[-1][0] + 1 if self._unsent else self._links[0].num_given
        self._unsent.append((number, frame))
        self._hand_on()

    def wait(self, is_done: Callable[[], bool]) -> None:
        """See Workers."""
        while not is_done():
            self.check()
            self._hand_on()
            self._take_answers(BEAT_SECONDS)

    def check(self) -> None:
        """See Workers."""
        if self.lost is not None:
            raise self.lost

    def look(self) -> None:
        """See Workers; what they have said meanwhile is received."""
        while self.lost is None and self._take_answers(0):
            pass
        self.check()

    def lose(self, why: str) -> None:
        """See Workers."""
        if self.lost is None:
            self.lost = lost_workers(why)
            logger.critical("%s", self.lost)
        self.end(0)

    def end(self, timeout: float = SECONDS_TO_END) -> None:
        """See Workers."""
        if os.getpid() != self._parent or self not in _running:
            return
        try:
            if timeout and self.lost is None and self._links:
                self._ask_to_end(timeout)
        finally:
            _running.discard(self)
            self._give_back()
            CLUSTER.leave()

    def _place(self, bundle: dict[str, int], num_together: int, strategy: str) -> None:
        """Room for every rank, so many of them in a bundle. EngineDeadError where there is none in time."""
        group, num_bundles = import_module("ray.util.placement_group"), self.num_workers // num_together
        self._group = group.placement_group([bundle] * num_bundles, strategy=strategy)
        if not self._group.wait(SECONDS_TO_PLACE):
            raise EngineDeadError(
                f"no room on the Ray cluster for {num_bundles} x {bundle}, placed {strategy}, within "
                f"{SECONDS_TO_PLACE:g} s: it has {self._nodes()}; add nodes, wait for others to end, or "
                "choose another ray_placement"
            )

    def _nodes(self) -> str:
        found = []
        for node in self._ray.nodes():
            if node["Alive"]:
                cpus, gpus = (node["Resources"].get(kind, 0) for kind in ("CPU", "GPU"))
                found.append(f"{node['NodeManagerAddress']} with CPU {cpus:g} and GPU {gpus:g}")
        return "; ".join(found)

    def _start(self, each: dict[str, int], num_together: int) -> None:
        """Every actor, once it knows where all meet."""
        strategy = import_module("ray.util.scheduling_strategies")
        actor = self._ray.remote(RankActor)
        for rank in range(self.num_workers):
            options = actor.options(
                num_cpus=each["CPU"],
                num_gpus=each.get("GPU", 0),
                max_concurrency=NUM_CALLS,
                runtime_env={"env_vars": CLUSTER.actor_env()},
                scheduling_strategy=strategy.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=rank // num_together
                ),
            )
            self._links.append(_Link(rank, options.remote(rank, self.num_workers)))
        for link, place in zip(self._links, self._places(), strict=True):
            link.place = place
        for link in self._links:
            link.actor.begin.remote(self._links[0].place.meeting)  # type: ignore[union-attr]

    def _places(self) -> Sequence[Place]:
        """Where actors run. EngineDeadError where one does not start, or cannot import what is here."""
        calls, places = [link.actor.place.remote() for link in self._links], []
        deadline = time.monotonic() + SECONDS_TO_START
        for link, call in zip(self._links, calls, strict=True):
            try:
                place = self._ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
            except Exception as error:  # an actor's own, or Ray's
                raise EngineDeadError(f"{link.name()} does not start: {_reason(error)}") from error
            if place.version != version():
                got = f"Lamina {place.version} is installed on {place.address} and {version()} here"
                raise EngineError(f"{got}; wanted the same version on every node")
            places.append(place)
        return places

    def _hand_on(self) -> None:
        """Send every worker what it was not sent; may be interrupted at any line, and be called again."""
        while self._unsent:
            number, frame = self._unsent[0]
            for link in self._links:
                link.give(number, frame)
            self._unsent.popleft()

    def _take_answers(self, seconds: float) -> bool:
        """Whether anything was answered within so many seconds; it is received now."""
        calls = [link.call for link in self._links]
        answered, _ = self._ray.wait(calls, num_returns=1, timeout=seconds)
        for link in self._links:
            if link.call in answered:
                self._take_in(link)
        if not answered:
            self._look_for_silence()
        return bool(answered)

    def _take_in(self, link: _Link) -> None:
        try:
            answers: Answers = self._ray.get(link.call)
        except Exception as error:  # its own process, its node, the cluster
            self.lose(f"{link.name()} has ended: {_reason(error)}")
            return
        for frame in answers.frames:
            self._receive(link.rank, wire.decode(frame))
        if answers.has_ended:
            self.lose(f"{link.name()} has stopped working")
        else:
            link.ask(answers.first + len(answers.frames))

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        for link in self._links:
            if now - link.asked > SECONDS_SILENT:
                self.lose(f"{link.name()} has said nothing for {SECONDS_SILENT:g} s: it is stopped, or hangs")
                return

    def _ask_to_end(self, timeout: float) -> None:
        """Have them end by themselves, those that do within so many seconds."""
        with suppress(EngineDeadError):
            self.send(Shutdown())
        open_links, deadline = list(self._links), time.monotonic() + timeout
        while open_links and time.monotonic() < deadline:
            calls = {link.call: link for link in open_links}
            for call in self._ray.wait(list(calls), num_returns=1, timeout=BEAT_SECONDS)[0]:
                if self._has_ended(calls[call]):
                    open_links.remove(calls[call])

    def _has_ended(self, link: _Link) -> bool:
        """Whether a worker has, by its newest answers, which nobody needs any more."""
        try:
            answers: Answers = self._ray.get(link.call)
        except Exception:  # its actor has
            return True
        if not answers.has_ended:
            link.ask(answers.first + len(answers.frames))
        return answers.has_ended

    def _give_back(self) -> None:
        """End the actors by force, wait until they have, and free their room."""
        if not self._ray.is_initialized():  # somebody has left the cluster, which ends everything
            return
        for link in self._links:
            with suppress(Exception):
                self._ray.kill(link.actor)
        deadline = time.monotonic() + SECONDS_TO_DIE
        for link in self._links:
            with suppress(Exception):  # its end
                while time.monotonic() < deadline:
                    answers = self._ray.get(link.call, timeout=max(0.0, deadline - time.monotonic()))
                    link.ask(answers.first)
        if self._group is not None:
            with suppress(Exception):
                import_module("ray.util.placement_group").remove_placement_group(self._group)


def _reason(error: Exception) -> str:
    """Why an actor has ended or not started, in Ray's words or those of what it raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return clipped(lines[-1] if lines else shown(error), 600)


def _end_with_interpreter() -> None:
    """End workers before Ray, which has registered itself before, leaves its cluster."""
    atexit.unregister(_end_all)
    atexit.register(_end_all)


def _end_all() -> None:
    for workers in [*_running]:
        workers.end()
