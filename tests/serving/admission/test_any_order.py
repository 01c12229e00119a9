"""Admission under any order of events: its sums are always those of the requests that live."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lamina.serving.admission.lease import Lease
from lamina.serving.auth.key import Key
from lamina.serving.errors import ApiError

from .books import Connection, Published, admission, ask, is_empty, key, settle


@dataclass(eq=False)
class Asked:
    """A request under way in the machine below."""

    connection: Connection
    task: "asyncio.Task[Lease]"
    num_sequences: int
    key: Key
    num_left: int = field(init=False)
    is_over: bool = False

    def __post_init__(self) -> None:
        self.num_left = self.num_sequences

    @property
    def lease(self) -> Lease | None:
        ok = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        return self.task.result() if ok else None


class Admitting(RuleBasedStateMachine):
    """In whatever order requests come, end or lose their clients, the sums are those of who lives."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.books = admission(max_num_seqs=3, max_waiting=6)
        self.keys = [key("a", max_concurrent=8), key("b"), key("b"), key("c", priority=1)]
        self.asked: list[Asked] = []
        self.num_generations = 0

    def spin(self) -> None:
        self.loop.run_until_complete(settle())

    @rule(target=requests, owner=st.integers(0, 3), num=st.integers(1, 4), priority=st.integers(-1, 2))
    def ask(self, owner, num, priority):
        async def start():
            connection = Connection(self.keys[owner])
            return connection, asyncio.ensure_future(ask(self.books, connection, num, priority=priority))

        connection, task = self.loop.run_until_complete(start())
        self.asked.append(Asked(connection, task, num, self.keys[owner]))
        self.spin()
        return self.asked[-1]

    @rule(asked=requests)
    def generate(self, asked):
        if asked.lease is not None and not asked.is_over:
            self.num_generations += 1
            asked.lease.attach(Published(f"g{self.num_generations}"))

    @rule(asked=requests)
    def finish(self, asked):
        lease = asked.lease
        if lease is not None and not asked.is_over and lease.generations:
            request_id = lease.generations[-1].request_id
            self.books.finished(SimpleNamespace(request_id=request_id, num_output_tokens=3))
            asked.num_left = max(asked.num_left - 1, 0)
            self.spin()

    @rule(asked=consumes(requests))
    def release(self, asked):
        if asked.lease is not None:
            asked.is_over = True
            asked.lease.release()
            asked.lease.release()
            self.spin()

    @rule(asked=requests)
    def disconnect(self, asked):
        asked.connection.gone.set()
        self.spin()

    @rule(asked=requests)
    def cancel(self, asked):
        asked.task.cancel()
        self.spin()

    @rule()
    def end_of_engine(self):
        self.books.refuse_waiting("lost")
        self.spin()

    @invariant()
    def sums_are_those_of_who_lives(self):
        self.spin()
        live = [asked for asked in self.asked if asked.lease is not None and not asked.is_over]
        waiting = [asked for asked in self.asked if not asked.task.done()]
        assert self.books.num_admitted == sum(asked.num_left for asked in live)
        assert self.books.num_waiting == len(waiting) == len(self.books._at)
        for each in self.keys:
            mine = [asked for asked in (*live, *waiting) if asked.key is each]
            assert each.meter.num_running == len(mine)
        if waiting:
            assert self.books.num_admitted >= self.books._most_held

    def teardown(self):
        for asked in self.asked:
            asked.task.cancel()
        self.spin()
        for asked in self.asked:
            if asked.lease is not None:
                asked.lease.release()
            elif not asked.task.cancelled():
                assert isinstance(asked.task.exception(), ApiError)
        assert is_empty(self.books)
        assert not self.books._queue._levels
        assert not asyncio.all_tasks(self.loop)
        assert [each.meter.num_running for each in self.keys] == [0, 0, 0, 0]
        self.loop.close()


TestAdmitting = Admitting.TestCase
TestAdmitting.settings = settings(stateful_step_count=40)
