"""The loop of a worker: what it answers to steps, calls and failures, over a runner in this thread."""

from collections import deque

import pytest
from msgspec.structs import replace

from lamina.common.errors import EngineError, UnsupportedError
from lamina.runtime.executor.worker_loop import WorkerLoop
from lamina.runtime.protocol import wire
from lamina.runtime.protocol.core_messages import Shutdown
from lamina.runtime.protocol.worker_messages import CallDone, CallWorker, ExecuteStep, StepDone

from .conftest import BLOCK_SIZE, BLOCKS, SEQS, TOKENS


class Breaking:
    """A runner that raises at some steps, by their place."""

    def __init__(self, runner, broken):
        self._runner, self._broken, self.num_steps = runner, broken, 0
        self.is_closed = False

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def execute(self, plan):
        self.num_steps += 1
        if self.num_steps in self._broken:
            raise RuntimeError(f"step {self.num_steps} is broken")
        return self._runner.execute(plan)

    def close(self):
        self.is_closed = True
        self._runner.close()


@pytest.fixture
def run(make_runner, make_server):
    """run(messages, broken steps, rank) -> what the loop answers; a plan stands for its ExecuteStep."""

    def run(messages, *, broken=(), rank=0):
        queue, said = deque([*messages, Shutdown()]), []
        runner = Breaking(make_runner(), broken)
        loop = WorkerLoop(
            runner,
            {"answer": lambda: {"is": 42}},
            answers=rank == 0,
            take=lambda seconds: None if seconds == 0 else wire.decode(wire.encode(queue.popleft())),
            send=lambda message: said.append(wire.decode(wire.encode(message))),
            on_build=lambda what: None,
        )
        loop.run()
        assert runner.is_closed
        return said

    return run


@pytest.fixture
def plans(make_server, make_runner):
    """Plans of one request, step after step, and the tokens that they come to."""
    server, runner = (
        make_server(blocks=BLOCKS, block_size=BLOCK_SIZE, seqs=SEQS, budget=TOKENS),
        make_runner(),
    )
    server.add("r", length=5, seed=1, max_tokens=5)
    found = []
    while server.scheduler.has_work:
        plan = server.scheduler.schedule()
        output = runner.execute(plan).read()
        found.append((plan, output.token_ids.tolist()))
        server.scheduler.update(plan, output)
    assert len(found) > 3
    return found


def steps(plans, known=0, first=1):
    return [
        ExecuteStep(number=first + place, known_failure=known, plan=plan)
        for place, (plan, _) in enumerate(plans)
    ]


def test_rank_0_answers_every_step_and_the_others_none(run, plans):
    said = run(steps(plans))
    assert [answer.number for answer in said] == list(range(1, 1 + len(plans)))
    assert [answer.output.token_ids.tolist() for answer in said] == [tokens for _, tokens in plans]
    assert run(steps(plans), rank=1) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_on_top_of_one_that_failed_is_not_run_until_its_failure_is_known(run, plans, rank):
    first, second, third = steps(plans[:3])
    whole = replace(plans[0][0], step=7)  # the request's first step again, as after a failure
    again = ExecuteStep(number=4, known_failure=1, plan=whole)
    said = run([first, second, third, again], broken={1}, rank=rank)
    failed = [answer.number for answer in said if answer.output.error is not None]
    assert failed == [1, 2, 3]
    assert isinstance(said[0].output.error, EngineError)
    assert "RuntimeError('step 1 is broken')" in str(said[0].output.error)
    assert "Traceback" in said[0].traceback
    assert "in execute" in said[0].traceback
    assert "came before it" in str(said[1].output.error)
    rest = [answer.output.token_ids.tolist() for answer in said[3:]]
    assert rest == ([plans[0][1]] if rank == 0 else [])


def test_a_failure_is_not_forgiven_by_knowing_of_an_older_one(run, plans):
    first, second, third = steps(plans[:3])
    said = run([first, replace(second, known_failure=1), replace(third, known_failure=1)], broken={1, 2})
    assert [answer.output.error is not None for answer in said] == [True, True, True]


def test_calls_are_answered_between_steps_and_their_errors_are_values(run, plans):
    first = steps(plans[:1])[0]
    said = run(
        [
            CallWorker(number=1, method="answer"),
            first,
            CallWorker(number=2, method="num_eager_steps"),
            CallWorker(number=3, method="_launch"),
            CallWorker(number=4, method="capture_next"),
        ]
    )
    assert said[0] == CallDone(number=1, value={"is": 42})
    assert isinstance(said[1], StepDone)
    for answer in said[2:4]:
        assert isinstance(answer.error, UnsupportedError)
        assert "wanted a public method of ModelRunner, answer" in str(answer.error)
    assert said[4].value is False
