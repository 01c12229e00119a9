"""Plans and outputs of steps arrive as they were sent, and what is none is refused."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lamina.common.errors import EngineError, WireError
from lamina.runtime.protocol import wire
from lamina.runtime.protocol.plain_data import PlainData
from lamina.runtime.protocol.runner_output import RunnerOutput
from lamina.runtime.protocol.scheduler_output import (
    SAMPLING,
    AdapterLoad,
    Adjusted,
    Constrained,
    Copies,
    Drafts,
    SchedulerOutput,
    StepAdapters,
    StepLogprobs,
    WantedLogprobs,
    no_requests,
    sampling_row,
)
from lamina.runtime.protocol.worker_messages import ExecuteStep, StepDone

from .engine_data import IDS, REPORTS, TEXT, params

PAIRS = st.lists(st.tuples(IDS, IDS), max_size=3).map(tuple)
ONE = replace(no_requests(), token_ids=np.arange(3, dtype=np.int32))


def ints(size, dtype=np.int64):
    limits = np.iinfo(dtype)
    elements = st.lists(st.integers(limits.min, limits.max), min_size=size, max_size=size)
    return elements.map(lambda values: np.array(values, dtype))


@st.composite
def plans(draw):
    rows, tokens, samples = (draw(st.integers(0, 3)) for _ in range(3))
    parameters = draw(st.lists(params(), min_size=samples, max_size=samples))
    adjusted = Adjusted(
        samples=draw(ints(samples)),
        params=tuple(parameters),
        num_prompt=draw(ints(samples)),
        slots=draw(ints(samples)),
        missed=((0, 1, (2, 3)),),
        longest=draw(IDS),
        constrained=(Constrained(0, 1, draw(TEXT), 2, drafts=(3,)),),
    )
    wanted = WantedLogprobs(
        num_top=2, samples=draw(ints(samples)), before=draw(ints(2)), targets=draw(ints(2, np.int32))
    )
    drafts = Drafts(
        sources=draw(ints(rows)), capacities=draw(ints(rows)), limits=draw(ints(rows)), num_next=2
    )
    adapters = StepAdapters(slots=draw(ints(rows)), loads=(AdapterLoad(1, draw(TEXT)),))
    return SchedulerOutput(
        step=draw(st.integers(0, 2**53)),
        request_ids=draw(st.lists(TEXT, min_size=rows, max_size=rows).map(tuple)),
        num_scheduled_tokens=draw(ints(rows)),
        num_computed_tokens=draw(ints(rows)),
        token_ids=draw(ints(tokens, np.int32)),
        sources=draw(ints(rows)),
        num_sampled_tokens=draw(ints(rows)),
        sampling=np.array([sampling_row(each) for each in parameters if each.seed is not None], SAMPLING),
        banned=((0, (1, 2)),),
        adjusted=draw(st.none() | st.just(adjusted)),
        new_blocks=draw(ints(6)).reshape(3, 2)[:, : draw(st.integers(0, 2))],
        copies=Copies(draw(PAIRS), draw(PAIRS)),
        preempted_ids=draw(st.lists(TEXT, max_size=2).map(tuple)),
        wanted_logprobs=draw(st.none() | st.just(wanted)),
        drafts=draw(st.none() | st.just(drafts)),
        adapters=draw(st.none() | st.just(adapters)),
    )


@st.composite
def outputs(draw):
    rows = draw(st.integers(0, 3))
    return RunnerOutput(
        token_ids=draw(ints(rows, np.int32)),
        num_sampled=draw(st.none() | ints(rows)),
        num_drafted=draw(st.none() | ints(rows)),
        draft_ids=draw(st.none() | ints(2 * rows, np.int32)),
        logprobs=draw(st.none() | st.builds(StepLogprobs, samples=REPORTS, prompts=REPORTS)),
        forced=draw(st.dictionaries(TEXT, st.lists(IDS, max_size=3).map(tuple), max_size=2)),
        pooled=draw(st.dictionaries(TEXT, st.binary(max_size=8), max_size=2)),
    )


def comparable(value):
    """A value whose arrays compare as a whole, by dtype, shape and bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, PlainData):
        return {name: comparable(getattr(value, name)) for name in value.__struct_fields__}
    return value


def sent(message):
    return wire.decode(wire.encode(message))


@given(plan=plans(), again=plans(), number=IDS)
def test_plans_arrive_as_they_were_one_after_another(plan, again, number):
    for each in (plan, again, plan):
        message = ExecuteStep(number=number, known_failure=0, plan=each)
        assert comparable(sent(message)) == comparable(message)


@given(output=outputs(), traceback=TEXT)
def test_outputs_arrive_as_they_were(output, traceback):
    message = StepDone(number=1, output=output, traceback=traceback)
    assert comparable(sent(message)) == comparable(message)


def test_a_step_that_failed_arrives_with_its_error():
    output = RunnerOutput(
        token_ids=np.zeros(0, np.int32), error=EngineError("a"), failures={"b": EngineError("c")}
    )
    arrived = sent(StepDone(number=1, output=output)).output
    assert str(arrived.error) == "a"
    assert str(arrived.failures["b"]) == "c"


def test_arrays_that_arrived_can_be_written_and_share_no_memory():
    plan = sent(ExecuteStep(number=1, known_failure=0, plan=ONE)).plan
    arrays = [getattr(plan, name) for name in plan.__struct_fields__]
    arrays = [array for array in arrays if isinstance(array, np.ndarray)]
    assert all(array.flags.writeable and array.flags.aligned for array in arrays)
    assert not any(np.may_share_memory(a, b) for a in arrays for b in arrays if a is not b)


@given(message=st.builds(ExecuteStep, number=IDS, known_failure=IDS, plan=plans()), data=st.data())
def test_a_garbled_plan_is_refused_or_some_other_message(message, data):
    frame = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = wire.decode(bytes(frame))
    except WireError:
        return
    assert type(found) in wire.CODES


@pytest.mark.parametrize("wrong", [np.zeros(1, np.float64), np.zeros(1, ">i8")])
def test_an_array_of_a_dtype_that_no_plan_has_is_refused_on_leaving(wrong):
    with pytest.raises(WireError, match=f"an array is of {wrong.dtype}; wanted one of int64"):
        wire.encode(ExecuteStep(number=1, known_failure=0, plan=replace(ONE, sources=wrong)))


@pytest.mark.parametrize(
    "wrong",
    [
        msgspec.msgpack.Ext(99, b""),
        msgspec.msgpack.Ext(1, b"seven b"),
        msgspec.msgpack.Ext(17, b"8" * 8),
        [1],
    ],
)
def test_what_is_no_array_is_refused_on_arrival(wrong):
    output = [wrong, *[None] * 5, {}, {}, {}, None]
    frame = bytes((wire.VERSION, wire.CODES[StepDone])) + msgspec.msgpack.encode([1, output, "", False])
    with pytest.raises(WireError, match="damaged"):
        wire.decode(frame)


def test_fields_too_many_of_a_step_are_refused():
    frame = wire.encode(StepDone(number=1, output=RunnerOutput(token_ids=np.zeros(0, np.int32))))
    plain = msgspec.msgpack.decode(frame[2:], ext_hook=msgspec.msgpack.Ext)
    for wrong in ([*plain, 1], [plain[0], [*plain[1], None], *plain[2:]]):
        with pytest.raises(WireError, match="length"):
            wire.decode(frame[:2] + msgspec.msgpack.encode(wrong))
