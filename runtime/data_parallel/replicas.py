"""The books of several engines: who has which request, what all were asked, and who is lost."""

import threading
import time
from collections.abc import Callable, Sequence

from ...common.errors import ConfigError, EngineDeadError, LaminaError, RequestError, shown
from ...common.logging import get_logger
from ..engine.core_handle import EngineReport, EngineState, Receiver
from ..protocol.core_messages import (
    AbortRequests,
    AddRequests,
    Call,
    Command,
    CoreStatus,
    Message,
    Reply,
    StepOutputs,
)
from ..protocol.engine_output import EngineOutput, Finish, Timeline
from .gathering import OF_ONE, Gathering
from .kept import KeptState
from .member import Member
from .router import Router

logger = get_logger("runtime")
CHANGING = ("load_adapter", "unload_adapter", "update_weights", "sleep", "wake")
EMPTYING = ("update_weights", "sleep")  # calls after which no prefix cache holds anything


class Replicas:
    """Engines that are alike: each request has one of them, and what changes one changes all.

    One lock guards everything. Messages go up under it, so that they come one at a time.
    """

    def __init__(
        self,
        members: Sequence[Member],
        router: Router,
        on_loss: Callable[[Member], None],
        *,
        num_ranks: int = 1,
    ) -> None:
        """members: open, one a number. on_loss(member): called under the lock while others are left.

        num_ranks: of each engine.
        """
        self.lock = threading.RLock()
        self.kept = KeptState()
        self.is_closing = False
        self._router, self._on_loss = router, on_loss
        self._joined = {member.number: member for member in members}
        self._reasons: dict[int, str] = {}  # why a lost one is, and what becomes of it
        self._drained: set[int] = set()
        self._queued: dict[str, float] = {}  # when each live request came
        self._calls: dict[int, Gathering] = {}
        self._receive: Receiver = _receive_nothing
        self.is_gone = False  # all of them
        self._num_engines, self._num_ranks = len(members), num_ranks

    def start(self, receive: Receiver) -> None:
        """Has receive called with what engines say."""
        self._receive = receive
        for member in [*self._joined.values()]:
            member.start(self.take)

    @property
    def members(self) -> list[Member]:
        """Those that are not lost."""
        return [*self._joined.values()]

    # What is asked.

    def send(self, command: Command) -> int | None:
        """See CoreHandle; EngineDeadError for requests where no engine takes any."""
        with self.lock:
            match command:
                case AddRequests():
                    return self._add(command)
                case AbortRequests():
                    self._abort(command)
                case Call():
                    self._ask(command)
                case _:
                    for member in self.members:
                        member.core.send(command)
        return None

    def _add(self, command: AddRequests) -> int:
        first, now = command.requests[0], time.monotonic()
        ids = [request.request_id for request in command.requests]
        engine = self._router.give(ids, first.prompt_token_ids, first.block_salt, self._usable())
        try:
            self._joined[engine].core.send(command)
        except BaseException:  # what cannot be sent to another process
            for request_id in ids:
                self._router.ended(request_id)
            raise
        self._queued.update(dict.fromkeys(ids, now))
        return engine

    def _usable(self) -> list[int]:
        """The engines that take requests, without those that hang unless all do."""
        taking = self._taking()
        if not taking:
            raise EngineDeadError(f"no engine takes requests: {self._why()}")
        return [each for each in taking if self._joined[each].core.status().reason is None] or taking

    def _taking(self) -> list[int]:
        return [number for number in sorted(self._joined) if number not in self._drained]

    def _abort(self, command: AbortRequests) -> None:
        by_engine: dict[int, list[str]] = {}
        for request_id in command.request_ids:
            engine = self._router.engine_of(request_id)
            if engine is not None:
                by_engine.setdefault(engine, []).append(request_id)
        for engine, ids in by_engine.items():
            part = AbortRequests(
                request_ids=tuple(ids), reason=command.reason, stop_reason=command.stop_reason
            )
            self._joined[engine].core.send(part)

    def _ask(self, call: Call) -> None:
        asked = self._asked_by(call)
        if (error := self._refusal(call, asked)) is not None:
            self._receive(Reply(number=call.number, error=error))
            return
        self._calls[call.number] = Gathering(call, asked)
        for engine in asked:
            self._joined[engine].core.send(self._own_call(call, engine))

    def _refusal(self, call: Call, asked: Sequence[int]) -> LaminaError | None:
        """Why a call is not passed on, None where it is."""
        if not asked:
            return EngineDeadError(f"engine is {shown(call.engine)}; it is not there: {self._why()}")
        if not _is_of_group(call):
            return None
        if len(asked) < self._num_engines:
            return EngineDeadError(f"a group would wait for an engine that is not there: {self._why()}")
        size, first = call.arguments[1]["world_size"], call.arguments[1]["rank"]
        wanted = first + self._num_engines * self._num_ranks
        if size < wanted:
            ranks = f"each of {self._num_engines} engines has {self._num_ranks} of its ranks, from {first} on"
            return ConfigError(f"world_size is {size}; wanted at least {wanted}, since {ranks}")
        return None

    def _own_call(self, call: Call, engine: int) -> Call:
        """What one engine is asked: of a trainer's group it has ranks after those of the one before."""
        if not _is_of_group(call):
            return call
        kind, group = call.arguments
        own = {**group, "rank": group["rank"] + engine * self._num_ranks}
        return Call(number=call.number, method=call.method, arguments=(kind, own))

    def _asked_by(self, call: Call) -> list[int]:
        joined = sorted(self._joined)
        if call.engine is not None:
            return [call.engine] if call.engine in self._joined else []
        return joined[:1] if call.method in OF_ONE else joined

    # What engines say.

    def take(self, member: Member, message: Message | None) -> None:
        """Takes in what one says; any thread."""
        with self.lock:
            if message is None:
                self._lose(member)
            elif isinstance(message, StepOutputs):
                self._note(message.outputs)
                self._receive(message)
            elif (gathering := self._calls.get(message.number)) is not None:
                gathering.take(member.number, message)
                self._settle(gathering)

    def _note(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            if output.finish is not None:
                self._router.ended(output.request_id)
                self._queued.pop(output.request_id, None)
            elif not output.num_before:
                self._router.began(output.request_id)

    def _settle(self, gathering: Gathering) -> None:
        """Passes on what a call came to, once all have replied."""
        if not gathering.is_whole:
            return
        call, reply = gathering.call, gathering.reply()
        del self._calls[call.number]
        if reply.error is None:
            self.kept.note(call, reply)
        elif len(gathering.failed) < len(gathering.replies):
            self._amend(gathering)
        if call.method in EMPTYING:
            self._router.forget_prefixes()
        self._receive(reply)

    def _amend(self, gathering: Gathering) -> None:
        """Some have done what others could not: all are to be alike."""
        call = gathering.call
        for engine, reply in gathering.replies.items():
            member = self._joined.get(engine)
            if member is None:
                continue
            if call.method == "update_weights" and reply.error is not None:
                logger.error("engine %d is ended: it has not the weights of the others", engine)
                member.core.drop()
            elif call.method == "load_adapter" and reply.error is None:
                member.core.send(
                    Call(number=call.number, method="unload_adapter", arguments=(reply.value["digest"],))
                )
        if call.method == "update_weights":
            self.kept.note(call, gathering.reply())

    def _lose(self, member: Member) -> None:
        engine = member.number
        if self._joined.get(engine) is not member:  # one that was being made the same as the others
            return
        del self._joined[engine]
        self._reasons[engine] = str(member.core.status().reason)
        if self._joined and not self.is_closing:
            self._end_requests(member.dead, self._router.lose(engine))
        for gathering in [*self._calls.values()]:
            gathering.leave(engine, member.dead)
            self._settle(gathering)
        if not self._joined:
            self._end_all()
        elif not self.is_closing:
            self._on_loss(member)

    def _end_requests(self, error: LaminaError, request_ids: Sequence[str]) -> None:
        now = time.monotonic()
        ended = [
            EngineOutput(
                request_id=request_id,
                num_before=0,
                finish=Finish(
                    reason="abort",
                    times=Timeline(queued=self._queued.pop(request_id, now), finished=now),
                    error=error,
                ),
            )
            for request_id in request_ids
        ]
        if ended:
            self._receive(StepOutputs(outputs=tuple(ended)))

    def _end_all(self) -> None:
        if not self.is_gone:
            self.is_gone = True
            self._receive(None)

    # Who takes part.

    def join(self, member: Member, version: int) -> bool:
        """Has an engine take part again; False where the others have changed since that version."""
        with self.lock:
            is_changing = any(each.call.method in CHANGING for each in self._calls.values())
            if self.is_closing or self.is_gone or member.is_gone:
                return False
            if is_changing or self.kept.version != version:
                return False
            self._joined[member.number] = member
            self._reasons.pop(member.number, None)
            return True

    def explain(self, engine: int, reason: str) -> None:
        """Says of a lost engine why it is, and what becomes of it."""
        with self.lock:
            self._reasons[engine] = reason

    def drain(self, engine: int) -> None:
        """See SeveralCores."""
        with self.lock:
            self._require(engine)
            if not [each for each in self._taking() if each != engine]:
                raise RequestError(f"engine is {engine}, the last that takes requests; wanted another one")
            self._drained.add(engine)

    def resume(self, engine: int) -> None:
        """See SeveralCores."""
        with self.lock:
            self._require(engine)
            self._drained.discard(engine)

    def reports(self) -> tuple[EngineReport, ...]:
        """See SeveralCores."""
        return tuple(self._report(engine) for engine in range(self._num_engines))

    def num_taking(self) -> int:
        """See SeveralCores."""
        with self.lock:
            return len(self._taking())

    def status(self) -> CoreStatus:
        """Returns the best of those that take requests, the steps of all, and why there is none."""
        statuses = {engine: self._status(engine) for engine in range(self._num_engines)}
        taking = [each for engine, each in statuses.items() if each.is_alive and engine not in self._drained]
        best = min(taking, key=lambda s: (s.reason is not None, s.step_seconds or 0.0), default=None)
        return CoreStatus(
            is_alive=any(each.is_alive for each in statuses.values()),
            reason=self._why() if best is None else best.reason,
            num_steps=sum(each.num_steps for each in statuses.values()),
            step_seconds=None if best is None else best.step_seconds,
            building=None if best is None else best.building,
            is_asleep=any(each.is_asleep for each in statuses.values()),
        )

    def _status(self, engine: int) -> CoreStatus:
        member = self._joined.get(engine)
        if member is not None:
            return member.core.status()
        return CoreStatus(is_alive=False, reason=self._reasons.get(engine, "it is being started"))

    def _report(self, engine: int) -> EngineReport:
        status, num_requests = self._status(engine), self._router.num_live[engine]
        state: EngineState = "serving" if status.is_alive else "lost"
        if state == "serving" and engine in self._drained:
            state = "draining" if num_requests else "drained"
        return EngineReport(
            number=engine,
            state=state,
            status=status,
            num_requests=num_requests,
            num_given=self._router.num_given[engine],
            num_given_by_prefix=self._router.num_given_by_prefix[engine],
        )

    def _why(self) -> str:
        parts = [f"engine {engine} is lost: {why}" for engine, why in sorted(self._reasons.items())]
        parts += [f"engine {engine} is drained" for engine in sorted(self._drained & self._joined.keys())]
        return "; ".join(parts)

    def _require(self, engine: int) -> None:
        if engine not in range(self._num_engines):
            raise RequestError(f"engine is {shown(engine)}; wanted one of 0 to {self._num_engines - 1}")


def _is_of_group(call: Call) -> bool:
    return call.method == "update_weights" and bool(call.arguments[0] == "group")


def _receive_nothing(message: Message | None) -> None:
    """Before anybody has asked for anything."""
