"""The executor in this process: what its worker says, errors as values, and plans and outputs that travel."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina.common.errors import ClosedError, LogitsError, ProcessorError, UnsupportedError
from lamina.compiler.execution.cuda_graphs import CudaGraphs
from lamina.runtime.executor.uniproc import UniprocExecutor
from lamina.runtime.protocol import wire
from lamina.runtime.protocol.interrupts import InterruptAtRequestError
from lamina.runtime.protocol.plain_data import PlainData
from lamina.runtime.protocol.runner_output import RunnerOutput, failed_step
from lamina.runtime.protocol.worker_messages import ExecuteStep, StepDone
from lamina.runtime.worker.graph_runner import Decode, PlannedCaptures
from lamina.runtime.worker.launched_step import LaunchedStep

from ..paged_model import VOCAB
from .conftest import BLOCK_SIZE, BLOCKS, SEQS, TOKENS

REQUESTS = st.fixed_dictionaries(
    {
        "length": st.integers(1, 20),
        "seed": st.integers(0, 3),
        "max_tokens": st.integers(1, 8),
        "min_tokens": st.sampled_from([0, 0, 1]),
        "stop_token_ids": st.sampled_from([(), (3,), (0, 7)]),
        "temperature": st.sampled_from([0.0, 1.0]),
        "top_k": st.sampled_from([0, 3]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.0]),
        "logit_bias": st.sampled_from([None, None, {2: 3.0}]),
        "bad_words": st.sampled_from([None, None, [[4], [1, 2]]]),
        "logprobs": st.sampled_from([None, None, 0, 3]),
        "prompt_logprobs": st.sampled_from([None, None, 2]),
        "logits_processors": st.sampled_from([None, None, [lambda prompt, answer, logits: logits.roll(1)]]),
    }
)


@pytest.fixture(scope="module")
def serve(make_server):
    """serve(**limits) -> a scheduler with its books, for the worker that make_runner makes."""

    def make(**limits):
        known = {"blocks": BLOCKS, "block_size": BLOCK_SIZE, "seqs": SEQS, "budget": TOKENS}
        return make_server(**known | limits)

    return make


def sent(value):
    """What another process receives of it."""
    return pickle.loads(pickle.dumps(value))


def framed(message):
    """What another process receives of it in a frame."""
    return wire.decode(wire.encode(message))


def plain(value: Any) -> Any:
    """A plan or an output as nested tuples that can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, BaseException):
        return type(value), str(value), value.__dict__
    if isinstance(value, PlainData):
        return type(value), *(plain(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=6),
    blocks=st.sampled_from([8, BLOCKS]),
    swap=st.sampled_from([0, 4]),
)
def test_copies_of_plans_through_the_executor_come_to_what_the_runner_says_of_them(
    serve, make_runner, requests, blocks, swap
):
    class NoCopies:
        def copy(self, copies):
            """Nothing reads the cache of this model."""

    server = serve(blocks=blocks, context=31, swap=swap, prefix_cache=True)
    runner = make_runner(host_blocks=NoCopies())
    executor = UniprocExecutor(make_runner(host_blocks=NoCopies()))
    for number, request in enumerate(requests):
        server.add(f"r{number}", **request)
        if request["logits_processors"]:  # code that no pickle takes
            for worker in (runner, executor):
                worker.add_request(f"r{number}", request["logits_processors"])
    while server.scheduler.has_work:
        plan = server.scheduler.schedule()
        received = sent(plan)
        assert plain(received) == plain(plan)
        if plan.adjusted is None or not plan.adjusted.histories:  # of code, which no frame holds
            assert plain(framed(ExecuteStep(number=1, known_failure=0, plan=plan)).plan) == plain(plan)
        handle = executor.execute(received)
        assert handle.error is None
        output = sent(handle.result())
        assert plain(output) == plain(handle.result()) == plain(runner.execute(plan).read())
        assert plain(framed(StepDone(number=1, output=output)).output) == plain(output)
        assert not output.failures
        assert len(output.token_ids) == plan.num_samples
        server.scheduler.update(plan, output)
    assert all(request.finish_reason in ("stop", "length") for request in server.requests.values())


def test_an_output_travels_with_the_errors_it_carries():
    failures = {"a": LogitsError("no number"), "b": ProcessorError("logits_processors[0] raised", "b")}
    outputs = [
        RunnerOutput(token_ids=np.array([3, -1], np.int32), failures=failures, num_sampled=np.array([1, 1])),
        failed_step(RuntimeError("out of memory")),
    ]
    for output in outputs:
        assert plain(sent(output)) == plain(output)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, LogitsError])
def test_what_fails_at_launch_is_a_value_and_the_next_step_is_sound(serve, make_runner, error):
    fails = [True]

    def forward(token_ids, positions, attend):
        if fails:
            raise error("odd")
        return torch.zeros(len(token_ids), VOCAB)

    executor = UniprocExecutor(make_runner(forward=forward, logits=lambda hidden: hidden))
    server = serve()
    server.add("a", 3, max_tokens=2)
    plan = server.scheduler.schedule()
    handle = executor.execute(plan)
    assert type(handle.error) is error
    assert handle.result().error is handle.error
    server.scheduler.discard(plan)
    fails.clear()
    output = executor.execute(server.scheduler.schedule()).result()
    assert output.error is None
    assert output.token_ids.tolist() == [0]


def test_what_fails_while_tokens_are_read_is_a_value(serve, make_runner, monkeypatch):
    executor = UniprocExecutor(make_runner())
    server = serve()
    server.add("a", 3)
    handle = executor.execute(server.scheduler.schedule())

    def fail(self):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(LaunchedStep, "read", fail)
    assert handle.error is None
    assert str(handle.result().error) == "the device is gone"


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["launch", "read"])
def test_an_interrupt_is_no_value(serve, make_runner, monkeypatch, where, interrupt):
    def stop(*args):
        raise interrupt

    executor = UniprocExecutor(make_runner(**{"forward": stop} if where == "launch" else {}))
    server = serve()
    server.add("a", 3)
    plan = server.scheduler.schedule()
    if where == "launch":
        with pytest.raises(interrupt):
            executor.execute(plan)
    else:
        handle = executor.execute(plan)
        monkeypatch.setattr(LaunchedStep, "read", stop)
        with pytest.raises(interrupt):
            handle.result()


def choose_five(prompt, answer, logits):
    """A logits processor."""
    return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor([5]), 0.0)


def raise_odd(prompt, answer, logits):
    raise ValueError("odd")


def interrupted(prompt, answer, logits):
    raise KeyboardInterrupt


@pytest.fixture
def processed(serve, make_runner):
    """processed(processor) -> the executor that knows it, and the first plan of whose it is."""

    def make(processor):
        server = serve()
        server.add("a", 3, max_tokens=2, logits_processors=[processor])
        executor = UniprocExecutor(make_runner())
        executor.add_request("a", (processor,))
        return executor, server.scheduler.schedule()

    return make


def test_processors_are_known_by_the_id_of_their_request(processed):
    executor, plan = processed(choose_five)
    assert executor.execute(plan).result().token_ids.tolist() == [5]


def test_a_processor_that_raises_fails_its_request_alone(processed):
    executor, plan = processed(raise_odd)
    output = executor.execute(plan).result()
    assert output.error is None
    assert str(output.failures["a"]) == "logits_processors[0] raised ValueError('odd')"


def test_ctrl_c_in_a_processor_says_whose_it_was(processed):
    executor, plan = processed(interrupted)
    with pytest.raises(InterruptAtRequestError) as caught:
        executor.execute(plan)
    assert caught.value.request_id == "a"


def test_a_request_that_was_removed_leaves_nothing_and_may_be_removed_again(processed):
    executor, _ = processed(choose_five)
    for _ in range(2):
        executor.remove_request("a")
        assert not executor.model_runner._adjuster.processors


def test_captures_are_made_one_by_one_and_dropped_together(make_runner):
    executor = UniprocExecutor(make_runner(cuda_graphs=CudaGraphs(torch.device("cpu"))))
    executor.model_runner.plan_captures(PlannedCaptures([Decode(1), Decode(4)]))
    assert [executor.capture_next() for _ in range(3)] == [True, True, False]
    executor.drop_captures()
    assert [executor.capture_next() for _ in range(3)] == [True, True, False]


def test_a_method_of_the_worker_is_called_by_its_name(make_runner):
    executor = UniprocExecutor(make_runner())
    assert executor.collective_rpc("plan_captures", PlannedCaptures()) == [0]
    assert executor.collective_rpc("profile", 4, 2) == [None]
    for method in ("_launch", "no_such", "host_blocks", "__class__"):
        with pytest.raises(UnsupportedError, match=f"method is '{method}'; wanted"):
            executor.collective_rpc(method)


def test_shutdown_twice_is_once_and_use_after_it_says_so(serve, make_runner):
    executor = UniprocExecutor(make_runner())
    server = serve()
    server.add("a", 3)
    plan = server.scheduler.schedule()
    executor.add_request("a", (choose_five,))
    executor.shutdown()
    executor.shutdown()
    executor.remove_request("a")
    uses = [
        lambda: executor.execute(plan),
        lambda: executor.add_request("b", ()),
        executor.capture_next,
        executor.drop_captures,
        lambda: executor.collective_rpc("profile", 1, 1),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="shut down"):
            use()
