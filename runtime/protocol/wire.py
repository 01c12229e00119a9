"""Messages between the processes of a runtime, as bytes: msgpack, in arrays.

A frame is a byte for the version of all this, a byte for the kind of its message, and the message's fields in
order. Plans and outputs, of which every step has some, are what msgspec reads and writes by itself; whatever
comes seldom is taken apart and put together here. Every value is checked on the way in.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import GenericAlias
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from ...common import errors
from ...common.errors import LaminaError, UnsupportedError, WireError, shown
from ..sampling_params import SEED_LIMIT, SamplingParams
from .core_description import CoreDescription
from .core_messages import AbortRequests, AddRequests, Call, CoreStatus, Reply, Shutdown, StepOutputs
from .engine_output import EngineOutput
from .engine_request import EngineRequest
from .fields import PARAMS, apart_kind, kinds_of, named, put_together, taken_apart, values_of
from .process_messages import CoreLost, FolderFound, LoadProgress, Start
from .step_codec import STEP, array_as_ext, array_of_ext, step_apart, step_together
from .worker_messages import (
    AddGrammar,
    CallDone,
    CallWorker,
    ExecuteStep,
    RemoveRequest,
    StartWorker,
    StepDone,
    WorkerReady,
)

VERSION = 9  # to be raised whenever a field is added, dropped or moved
PLAIN = (str, int, float, bool)  # of an error's attributes, those that travel
ERRORS: dict[str, type[LaminaError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, LaminaError)
}


class _Codec(NamedTuple):
    """How one kind of message is taken apart and put together."""

    kind: type
    take_apart: Callable[[Any], Any]
    put_together: Callable[[Any], Any]
    decoder: "msgspec.msgpack.Decoder[Any]"


def encode(message: Any) -> bytes:
    """Returns a message as a frame. WireError for what is no plain data, UnsupportedError for objects."""
    code = CODES.get(type(message))
    if code is None:
        raise WireError(f"a message is {shown(message)}; wanted one of {_names()}")
    try:
        return bytes((VERSION, code)) + ENCODER.encode(CODECS[code].take_apart(message))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"a {type(message).__name__} cannot be sent to another process: {error}") from error


def decode(frame: "bytes | memoryview") -> Any:
    """Returns the message of a frame. WireError for whatever encode() does not make."""
    if len(frame) < 2 or frame[0] != VERSION:
        got = f"a frame of {len(frame)} bytes begins with {shown(bytes(frame[:2]))}"
        raise WireError(
            f"{got}; wanted version {VERSION}: were the packages changed under a running process?"
        )
    codec = CODECS.get(frame[1])
    if codec is None:
        raise WireError(f"a frame is of kind {frame[1]}; wanted one of {_names()}")
    try:
        return codec.put_together(codec.decoder.decode(memoryview(frame)[2:]))
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise WireError(f"a frame of {len(frame)} bytes is damaged: {shown(error, 300)}") from error


def _object_as_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return array_as_ext(value)
    if isinstance(value, LaminaError):
        return _error_as_plain(value)
    raise TypeError(f"{type(value).__name__} is no plain data")


def _object_of_plain(kind: type, value: Any) -> Any:
    if kind is np.ndarray and isinstance(value, np.ndarray):
        return value
    if kind in (LaminaError, Exception):
        return _error_of_plain(value)
    raise TypeError(f"{type(value).__name__} is no {kind}")


def _error_as_plain(value: LaminaError) -> Any:
    """An error as its class, its words and its plain attributes; of a class unknown here, the next above."""
    name = next(kind.__name__ for kind in type(value).__mro__ if ERRORS.get(kind.__name__) is kind)
    words = tuple(_valid(arg if isinstance(arg, str) else shown(arg)) for arg in value.args)
    attributes = {key: own for key, own in vars(value).items() if type(own) in PLAIN}
    return name, words, {key: _valid(own) if isinstance(own, str) else own for key, own in attributes.items()}


def _error_of_plain(value: Any) -> LaminaError:
    name, words, attributes = msgspec.convert(value, ERROR)
    found = ERRORS.get(name)
    if found is None:
        raise ValueError(f"an error is a {shown(name)}; wanted one of {', '.join(ERRORS)}")
    error = found.__new__(found, *words)
    error.__dict__.update(attributes)
    return error


def _valid(text: str) -> str:
    """The text without lone surrogates, which have no encoding."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


ERROR = tuple[str, tuple[str, ...], dict[str, str | int | float | bool]]
ENCODER = msgspec.msgpack.Encoder(enc_hook=_object_as_plain)
REQUEST = tuple(each for each in dataclasses.fields(EngineRequest) if each.name != "params")
UNSEEDED = tuple(each for each in PARAMS if each.name != "seed")
Seed = Annotated[int, msgspec.Meta(ge=-SEED_LIMIT, le=SEED_LIMIT - 1)]
MOST_KEPT = 256  # parameters that requests had in common but for their seeds
LARGEST_KEPT = 1024  # bytes of such


def _of_dataclass(kind: type) -> _Codec:
    if not dataclasses.fields(kind):
        return _Codec(kind, lambda _: (), lambda _: kind(), _decoder(tuple[()]))
    return _Codec(kind, taken_apart, partial(put_together, kind), _decoder(apart_kind(kind)))


def _itself(message: Any) -> Any:
    return message


def _decoder(kind: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(kind, dec_hook=_object_of_plain, ext_hook=array_of_ext)


def _requests_apart(message: AddRequests) -> list[Any]:
    return [_request_apart(request) for request in message.requests]


def _request_apart(request: EngineRequest) -> tuple[Any, int | None, Any]:
    params = request.params
    if params.logits_processors:
        raise UnsupportedError(
            f"logits_processors holds {shown(params.logits_processors)}, and code cannot be sent to the "
            'engine\'s process; use engine="thread", or the blocking Runtime'
        )
    return values_of(request, REQUEST), params.seed, values_of(params, UNSEEDED)


def _requests_together(values: Any) -> AddRequests:
    return AddRequests(
        requests=tuple(
            EngineRequest(params=_params_of(bytes(params)).with_seed(seed), **named(REQUEST, request))
            for request, seed, params in values
        )
    )


def _params_of(data: bytes) -> SamplingParams:
    return _known_params(data) if len(data) <= LARGEST_KEPT else _new_params(data)


def _new_params(data: bytes) -> SamplingParams:
    return SamplingParams(**named(UNSEEDED, _unseeded_decoder.decode(data)))


_known_params = lru_cache(MOST_KEPT)(_new_params)  # made, and checked, once for all that have them in common
_unseeded_decoder = _decoder(kinds_of(UNSEEDED))
CODECS: Mapping[int, _Codec] = {
    1: _Codec(
        AddRequests,
        _requests_apart,
        _requests_together,
        _decoder(GenericAlias(tuple, (GenericAlias(tuple, (kinds_of(REQUEST), Seed, msgspec.Raw)), ...))),
    ),
    2: _of_dataclass(AbortRequests),
    3: _of_dataclass(Call),
    4: _of_dataclass(Shutdown),
    5: _of_dataclass(Start),
    6: _of_dataclass(StartWorker),
    7: _Codec(ExecuteStep, step_apart, step_together, _decoder(STEP)),
    8: _of_dataclass(AddGrammar),
    9: _of_dataclass(RemoveRequest),
    10: _of_dataclass(CallWorker),
    16: _Codec(
        StepOutputs,
        lambda message: message.outputs,
        lambda outputs: StepOutputs(outputs=outputs),
        _decoder(tuple[EngineOutput, ...]),
    ),
    17: _of_dataclass(Reply),
    18: _of_dataclass(CoreStatus),
    19: _of_dataclass(CoreDescription),
    20: _of_dataclass(LoadProgress),
    21: _of_dataclass(FolderFound),
    22: _of_dataclass(CoreLost),
    24: _of_dataclass(WorkerReady),
    25: _Codec(StepDone, _itself, _itself, _decoder(StepDone)),
    26: _of_dataclass(CallDone),
}
CODES = {codec.kind: code for code, codec in CODECS.items()}


def _names() -> str:
    return ", ".join(f"{code} ({codec.kind.__name__})" for code, codec in CODECS.items())
