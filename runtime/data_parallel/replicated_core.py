"""Several engines as one core: each in a process of its own, started anew where it is lost."""

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from ...common.errors import ClosedError, ConfigError, shown
from ...common.logging import get_logger
from ..engine.core_handle import EngineReport, OpenedCore, Receiver
from ..protocol.core_messages import Command, CoreStatus
from .member import Member, OwnedCore
from .replicas import Replicas
from .router import Router
from .shares import Share

logger = get_logger("runtime")
OpenEngine = Callable[[Share], OwnedCore]
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0  # seconds before an engine that was lost is started anew
SECONDS_TO_SETTLE = 120.0  # of service after which a loss counts as the first
SECONDS_AT_EXIT = 10.0
LOADING = CoreStatus(is_alive=False, reason="it is being loaded")
_running: "set[_Engines]" = set()  # to be ended before the interpreter is


class ReplicatedCore:
    """Several engines; see CoreHandle and SeveralCores. Dropped without close(), they end."""

    takes_objects = False

    def __init__(self, shares: Sequence[Share], open_engine: OpenEngine) -> None:
        """shares: one an engine. open_engine(share): begins to load one, now, and whenever it was lost."""
        self._engines = _Engines(shares, open_engine)
        weakref.finalize(self, self._engines.drop).atexit = False

    @property
    def opened(self) -> Future[OpenedCore]:
        """See CoreHandle: what all engines have, or the first error."""
        return self._engines.opened

    def start(self, receive: Receiver) -> None:
        """See CoreHandle."""
        self._engines.replicas.start(receive)

    def send(self, command: Command) -> int | None:
        """See CoreHandle."""
        return self._engines.replicas.send(command)

    def status(self) -> CoreStatus:
        """See CoreHandle: that of the engine that can answer best, with the steps of all."""
        return self._engines.replicas.status() if self._engines.is_open else LOADING

    def reports(self) -> tuple[EngineReport, ...]:
        """See SeveralCores."""
        return self._engines.replicas.reports()

    def num_taking(self) -> int:
        """See SeveralCores."""
        return self._engines.replicas.num_taking()

    def drain(self, engine: int) -> None:
        """See SeveralCores."""
        self._engines.replicas.drain(engine)

    def resume(self, engine: int) -> None:
        """See SeveralCores."""
        self._engines.replicas.resume(engine)

    def close(self, timeout: float = 10.0) -> None:
        """See CoreHandle; all engines end at once."""
        self._engines.end(timeout)


class _Engines:
    """The processes, which know nothing of the handle, so that it can be dropped."""

    def __init__(self, shares: Sequence[Share], open_engine: OpenEngine) -> None:
        self.opened: Future[OpenedCore] = Future()
        self.opened.set_running_or_notify_cancel()
        self.replicas: Replicas
        self.is_open = False
        self._open_engine, self._shares = open_engine, shares
        self._is_ending = False
        self._parent = os.getpid()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._pauses: dict[int, float] = {}  # seconds, by the number of an engine that was lost of late
        self._restarts: list[threading.Thread] = []
        self._members = {number: self._member(number) for number in range(len(shares))}
        _running.add(self)
        for member in [*self._members.values()]:
            member.core.opened.add_done_callback(partial(self._note_opened, member))

    def end(self, timeout: float) -> None:
        if os.getpid() != self._parent:
            return
        self._closed.set()
        self._begin_end()
        with self._lock:
            members = [*self._members.values()]
        closing = [threading.Thread(target=member.core.close, args=(timeout,)) for member in members]
        for thread in closing:
            thread.start()
        for thread in [*closing, *self._restarts]:
            thread.join()
        _running.discard(self)

    def drop(self) -> None:
        """End them, as nobody can ask for anything any more; may be called at any line of any thread.

        So it takes no lock; a thread that waits to start one anew sees it when it has waited.
        """
        self._begin_end()
        for member in [*self._members.values()]:
            member.core.drop()
        _running.discard(self)

    def _begin_end(self) -> None:
        self._is_ending = True
        if self.is_open:
            self.replicas.is_closing = True

    def _note_opened(self, member: Member, _: "Future[OpenedCore]") -> None:
        """One is open, or cannot be opened; in a thread of its own."""
        with self._lock:
            futures = [each.core.opened for each in self._members.values()]
            if self.opened.done():
                return
            error = next((f.exception() for f in futures if f.done() and f.exception() is not None), None)
            if error is not None:
                self.opened.set_exception(error)
            elif all(future.done() for future in futures):
                self._open([future.result() for future in futures])

    def _open(self, opened: Sequence[OpenedCore]) -> None:
        try:
            merged = merged_opening(opened, has_gpus=bool(self._shares[0].gpus))
        except ConfigError as error:
            self.opened.set_exception(error)
            return
        block_size = merged.description.settings["block_size"]
        has_cache = self._shares[0].settings.get("prefix_cache", True)
        num_blocks = merged.description.capacity_tokens // block_size if has_cache else 0
        settings = self._shares[0].settings
        ranks = settings.get("tensor_parallel", 1) * settings.get("pipeline_parallel", 1)
        router = Router(len(self._shares), block_size=block_size, num_blocks=num_blocks)
        self.replicas = Replicas([*self._members.values()], router, self._restart, num_ranks=ranks)
        self.is_open = True
        self.opened.set_result(merged)

    def _restart(self, lost: Member) -> None:
        """Start an engine anew, in a thread; under the lock of the books."""
        name = f"lamina-engine-{lost.number}-restart"
        thread = threading.Thread(target=self._start_anew, args=(lost.number,), name=name, daemon=True)
        self._restarts = [each for each in self._restarts if each.is_alive()] + [thread]
        thread.start()

    def _start_anew(self, number: int) -> None:
        pause = self._pauses.get(number, FIRST_PAUSE)
        while not (self._closed.wait(pause) or self._is_ending or self.replicas.is_gone):
            self._pauses[number] = pause = min(2 * pause, LONGEST_PAUSE)
            reason = self.replicas.kept.obstacle or self._try(number)
            if reason is None:
                logger.warning("engine %d serves again", number)
                forget = threading.Timer(SECONDS_TO_SETTLE, self._pauses.pop, (number, None))
                forget.daemon = True
                forget.start()
                return
            self.replicas.explain(number, f"{reason}; it is tried again in {pause:g} s")
            logger.error("engine %d cannot be started anew: %s", number, reason)

    def _member(self, number: int) -> Member:
        return Member(number, self._open_engine(self._shares[number]))

    def _try(self, number: int) -> str | None:
        """Why an engine could not be started anew and made as the others are; None: it serves."""
        member = None
        try:
            member = self._member(number)
            with self._lock:
                self._members[number] = member
            if self._is_ending:
                raise ClosedError("this runtime was closed")
            member.core.opened.result()
            member.start(self.replicas.take)
            version = self.replicas.kept.version
            for method, arguments in self.replicas.kept.calls():
                member.ask(method, *arguments)
            if self.replicas.join(member, version):
                return None
            reason = "the others were changed meanwhile"
        except Exception as error:
            reason = shown(str(error), 500)
        if member is not None:
            member.core.close()
        return reason


def merged_opening(opened: Sequence[OpenedCore], *, has_gpus: bool) -> OpenedCore:
    """Returns what engines have together; ConfigError where they are not alike.

    has_gpus: whether each was given GPUs of its own.
    """
    first = opened[0]
    descriptions = [each.description for each in opened]
    kinds = {each.device.partition(":")[0] for each in descriptions}
    if len(kinds) > 1:
        raise ConfigError(f"engines run on {' and '.join(sorted(kinds))}; wanted one of them: set device")
    if kinds == {"cuda"} and not has_gpus:
        raise ConfigError("GPUs could not be counted to be shared out; wanted them in CUDA_VISIBLE_DEVICES")
    if len({each.vocab_size for each in descriptions}) > 1:
        raise ConfigError("engines have different models: the checkpoint was changed meanwhile; start again")
    least = {
        name: min(getattr(each, name) for each in descriptions)
        for name in ("max_model_len", "capacity_tokens")
    }
    return replace(first, description=replace(first.description, **least))


@atexit.register
def _end_all() -> None:
    """End every engine before the interpreter, and start none anew."""
    for engines in [*_running]:
        engines.end(SECONDS_AT_EXIT)
