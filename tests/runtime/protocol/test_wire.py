"""Messages between processes arrive as they were sent, and what is no message is refused."""

import dataclasses
import inspect

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import EngineError, LaminaError, RequestError, SamplingParams, UnsupportedError
from lamina.common import errors
from lamina.common.errors import WireError
from lamina.models.generation_config import GenerationDefaults
from lamina.models.pooling.spec import Dense, PoolingSpec
from lamina.runtime.pooling_params import PoolingParams
from lamina.runtime.protocol import wire
from lamina.runtime.protocol.core_description import CoreDescription
from lamina.runtime.protocol.core_messages import (
    AbortRequests,
    AddRequests,
    Call,
    CoreStatus,
    Reply,
    Shutdown,
    StepOutputs,
)
from lamina.runtime.protocol.engine_request import EngineRequest
from lamina.runtime.protocol.process_messages import CoreLost, FolderFound, LoadProgress, Start
from lamina.runtime.protocol.scheduler_output import WantedPooling, no_requests
from lamina.runtime.protocol.worker_messages import ExecuteStep

from .engine_data import IDS, OUTPUTS, REQUESTS, TEXT, plain

COUNTS = st.integers(0, 2**53)
SECONDS = st.floats(0, 1e9)
ERROR_CLASSES = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind) and issubclass(kind, LaminaError) and kind is not errors.ProcessorError
]
ERRORS = st.one_of(
    st.builds(lambda kind, text: kind(text), st.sampled_from(ERROR_CLASSES), TEXT),
    st.builds(errors.ProcessorError, TEXT, TEXT),
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
DEFAULTS = st.builds(
    GenerationDefaults,
    eos_token_ids=st.lists(IDS, max_size=3).map(tuple),
    temperature=st.none() | st.floats(0, 9),
    top_k=st.none() | IDS,
    repetition_penalty=st.none() | st.floats(0, 9),
)
MESSAGES = st.one_of(
    st.builds(AddRequests, requests=st.lists(REQUESTS, max_size=3).map(tuple)),
    st.builds(
        AbortRequests,
        request_ids=st.lists(TEXT, max_size=3).map(tuple),
        reason=st.sampled_from(["stop", "length", "abort"]),
        stop_reason=st.none() | IDS | TEXT,
    ),
    st.builds(Call, number=COUNTS, method=TEXT, arguments=st.lists(ANYTHING, max_size=2).map(tuple)),
    st.just(Shutdown()),
    st.builds(Start, settings=st.binary(max_size=9), log_level=IDS),
    st.builds(StepOutputs, outputs=st.lists(OUTPUTS, max_size=4).map(tuple)),
    st.builds(Reply, number=COUNTS, value=ANYTHING, error=st.none() | ERRORS),
    st.builds(
        CoreStatus,
        is_alive=st.booleans(),
        reason=st.none() | TEXT,
        num_steps=COUNTS,
        step_seconds=st.none() | SECONDS,
        building=st.none() | TEXT,
    ),
    st.builds(
        CoreDescription,
        **dict.fromkeys(("model", "folder", "device"), TEXT),
        defaults=DEFAULTS,
        generation_defaults=st.booleans(),
        eos_token_ids=st.lists(IDS, max_size=3).map(tuple),
        **dict.fromkeys(("vocab_size", "num_valid_ids", "max_model_len", "capacity_tokens"), COUNTS),
        declared_len=st.none() | COUNTS,
        seed=st.integers(-(2**63), 2**63 - 1),
        settings=st.dictionaries(TEXT, ANYTHING, max_size=3),
    ),
    st.builds(LoadProgress, stage=TEXT, fraction=st.floats(0, 1), detail=TEXT),
    st.builds(FolderFound, folder=TEXT),
    st.builds(CoreLost, error=ERRORS),
)
# A value other than the default for every parameter that can travel, as resolved parameters hold it.
SETTINGS = {
    "n": 2,
    "best_of": 3,
    "logprobs": 4,
    "prompt_logprobs": 5,
    "max_tokens": 6,
    "min_tokens": 3,
    "temperature": 0.25,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.125,
    "typical_p": 0.75,
    "presence_penalty": -1.5,
    "frequency_penalty": 1.25,
    "repetition_penalty": 1.5,
    "logit_bias": {3: -2.5, 9: 100.0},
    "allowed_token_ids": (3, 9),
    "bad_words": ((3, 9), (4,)),
    "seed": -(2**63),
    "stop": ("é", "two\n"),
    "stop_token_ids": (8, 1),
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "detokenize": False,
}


@given(message=MESSAGES)
def test_every_message_arrives_as_it_was_sent(message):
    assert plain(wire.decode(wire.encode(message))) == plain(message)


@given(message=MESSAGES, data=st.data())
def test_a_frame_cut_short_or_followed_by_more_is_refused(message, data):
    frame = wire.encode(message)
    cut = data.draw(st.integers(0, len(frame) - 1))
    for wrong in (frame[:cut], frame + b"\xc0"):
        with pytest.raises(WireError):
            wire.decode(wrong)


@given(message=MESSAGES, data=st.data())
def test_a_garbled_frame_is_refused_or_some_other_message(message, data):
    frame = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = wire.decode(bytes(frame))
    except WireError:
        return
    assert type(found) in wire.CODES


@given(frame=st.binary(max_size=64))
def test_noise_is_no_message_of_requests(frame):
    with pytest.raises(WireError, match="frame"):
        wire.decode(bytes((wire.VERSION, wire.CODES[AddRequests], 0x93)) + frame)


def test_every_sampling_parameter_travels():
    names = {field.name for field in dataclasses.fields(SamplingParams)} - {
        "logits_processors",
        "structured_outputs",
    }
    assert names == SETTINGS.keys()
    for name, value in SETTINGS.items():
        beside = {"max_tokens": 9} if name == "min_tokens" else {}
        params = SamplingParams(**{name: value}, **beside).resolve(None, seed=1)
        request = EngineRequest(request_id="a", prompt_token_ids=(1,), params=params, max_total_tokens=9)
        arrived = wire.decode(wire.encode(AddRequests(requests=(request,)))).requests[0]
        assert arrived == request
        assert getattr(arrived.params, name) == value, name


def test_a_request_that_brings_code_is_refused_by_name():
    params = SamplingParams(logits_processors=[lambda prompt, answer, logits: logits]).resolve(None, seed=1)
    request = EngineRequest(request_id="a", prompt_token_ids=(1,), params=params, max_total_tokens=9)
    with pytest.raises(UnsupportedError, match=r"logits_processors .*thread"):
        wire.encode(AddRequests(requests=(request,)))


def test_requests_that_differ_in_their_seeds_alone_keep_them():
    seeds = (1, -(2**63), 2**63 - 1, 1)
    requests = tuple(
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=(1,),
            params=SamplingParams(top_k=4).resolve(None, seed=seed),
            max_total_tokens=9,
        )
        for number, seed in enumerate(seeds)
    )
    for _ in range(2):
        arrived = wire.decode(wire.encode(AddRequests(requests=requests))).requests
        assert arrived == requests


def test_a_seed_of_more_than_64_bits_is_refused_on_arrival():
    params = SamplingParams().resolve(None, seed=1)
    object.__setattr__(params, "seed", 2**63)
    request = EngineRequest(request_id="a", prompt_token_ids=(1,), params=params, max_total_tokens=9)
    with pytest.raises(WireError, match="damaged"):
        wire.decode(wire.encode(AddRequests(requests=(request,))))


def test_parameters_out_of_their_range_are_refused_on_arrival():
    params = SamplingParams().resolve(None, seed=1)
    object.__setattr__(params, "top_p", 7.0)
    request = EngineRequest(request_id="a", prompt_token_ids=(1,), params=params, max_total_tokens=9)
    with pytest.raises(WireError, match="top_p"):
        wire.decode(wire.encode(AddRequests(requests=(request,))))


@pytest.mark.parametrize("value", [object(), {1, object()}, b"".join, 2**70])
def test_what_is_no_plain_data_is_refused_on_leaving(value):
    with pytest.raises(WireError, match="Reply"):
        wire.encode(Reply(number=1, value=value))


def test_what_is_no_message_is_refused_on_leaving():
    with pytest.raises(WireError, match="wanted one of"):
        wire.encode("stats")


def test_an_error_of_a_class_unknown_there_arrives_as_what_it_derives_from():
    class OwnError(RequestError):
        pass

    error = wire.decode(wire.encode(Reply(number=1, error=OwnError("a word", 7)))).error
    assert type(error) is RequestError
    assert error.args == ("a word", "7")


def test_an_error_arrives_without_what_has_no_encoding():
    error = wire.decode(wire.encode(CoreLost(error=EngineError("half \udcff of it")))).error
    assert str(error) == "half \\udcff of it"


def test_an_error_of_an_unknown_name_and_another_version_are_refused():
    frame = wire.encode(CoreLost(error=EngineError("gone")))
    with pytest.raises(WireError, match="EngineFault"):
        wire.decode(frame.replace(b"EngineError", b"EngineFault"))
    with pytest.raises(WireError, match="version"):
        wire.decode(bytes((wire.VERSION + 1,)) + frame[1:])
    with pytest.raises(WireError, match="kind 99"):
        wire.decode(bytes((wire.VERSION, 99)) + frame[2:])


def test_fields_too_many_are_refused():
    wrong = bytes((wire.VERSION, wire.CODES[FolderFound])) + msgspec.msgpack.encode(["folder", "more"])
    with pytest.raises(WireError, match="length"):
        wire.decode(wrong)


def described(pooling):
    return CoreDescription(
        model="m",
        folder="/m",
        device="cpu",
        defaults=GenerationDefaults(),
        generation_defaults=True,
        eos_token_ids=(2,),
        vocab_size=8,
        num_valid_ids=8,
        max_model_len=16,
        declared_len=None,
        capacity_tokens=64,
        seed=0,
        pooling=pooling,
        settings={},
    )


def test_dataclasses_within_tuples_and_within_others_arrive_as_they_were():
    params = PoolingParams(pooling="mean", dimensions=3, normalize=True)
    none = np.zeros(0, np.int64)
    wanted = WantedPooling(rows=none, are_last=np.zeros(0, np.bool_), params=(params, params))
    for asked in (wanted, msgspec.structs.replace(wanted, params=())):
        plan = msgspec.structs.replace(no_requests(), pooling=asked)
        received = wire.decode(wire.encode(ExecuteStep(number=1, known_failure=0, plan=plan))).plan
        assert received.pooling.params == asked.params
        assert received.pooling.are_last.dtype == np.bool_
    dense = Dense(folder="2_Dense", in_features=4, out_features=2, bias=True, activation="tanh")
    for parts in ((), (dense,), (dense, dense)):
        spec = PoolingSpec(pooling="last", size=2, dense=parts)
        assert wire.decode(wire.encode(described(spec))).pooling == spec
