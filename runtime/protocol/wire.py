"""Messages between the process of a core and the one that serves, as bytes: msgpack, in arrays.

A frame is a byte for the version of all this, a byte for the kind of its message, and the message's fields in
order. Outputs, of which there is one a request and step, are tuples that msgspec reads and writes as such;
whatever comes seldom is taken apart and put together here, with every value checked on the way in.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import GenericAlias
from typing import Any, NamedTuple

import msgspec

from ...common import errors
from ...common.errors import LaminaError, UnsupportedError, WireError, shown
from ..sampling_params import SamplingParams
from .core_description import CoreDescription
from .core_messages import AbortRequests, AddRequests, Call, CoreStatus, Reply, Shutdown, StepOutputs
from .engine_output import EngineOutput
from .engine_request import EngineRequest
from .process_messages import CoreLost, FolderFound, LoadProgress, ProcessEnded, Start

VERSION = 4  # to be raised whenever a field is added, dropped or moved
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


def decode(frame: bytes) -> Any:
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


def _error_as_plain(value: Any) -> Any:
    """An error as its class, its words and its plain attributes; of a class unknown here, the next above."""
    if not isinstance(value, LaminaError):
        raise TypeError(f"{type(value).__name__} is no plain data")
    name = next(kind.__name__ for kind in type(value).__mro__ if ERRORS.get(kind.__name__) is kind)
    words = tuple(_valid(arg if isinstance(arg, str) else shown(arg)) for arg in value.args)
    attributes = {key: own for key, own in vars(value).items() if type(own) in PLAIN}
    return name, words, {key: _valid(own) if isinstance(own, str) else own for key, own in attributes.items()}


def _error_of_plain(kind: type, value: Any) -> LaminaError:
    if kind is not LaminaError:
        raise TypeError(f"{kind} is not what errors are")
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


ELSEWHERE = ("logits_processors", "structured_outputs")  # objects, and what goes as a grammar
ERROR = tuple[str, tuple[str, ...], dict[str, str | int | float | bool]]
ENCODER = msgspec.msgpack.Encoder(enc_hook=_error_as_plain)
PARAMS = tuple(each for each in dataclasses.fields(SamplingParams) if each.name not in ELSEWHERE)
REQUEST = tuple(each for each in dataclasses.fields(EngineRequest) if each.name != "params")


def _values(message: Any, fields: tuple["dataclasses.Field[Any]", ...]) -> tuple[Any, ...]:
    return tuple(getattr(message, each.name) for each in fields)


def _kinds(fields: tuple["dataclasses.Field[Any]", ...]) -> Any:
    return GenericAlias(tuple, tuple(each.type for each in fields))


def _named(fields: tuple["dataclasses.Field[Any]", ...], values: tuple[Any, ...]) -> dict[str, Any]:
    return {each.name: value for each, value in zip(fields, values, strict=True)}


def _of_dataclass(kind: type) -> _Codec:
    fields = dataclasses.fields(kind)
    if not fields:
        return _Codec(kind, lambda _: (), lambda _: kind(), _decoder(tuple[()]))
    return _Codec(
        kind,
        lambda message: _values(message, fields),
        lambda values: kind(**_named(fields, values)),
        _decoder(_kinds(fields)),
    )


def _decoder(kind: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(kind, dec_hook=_error_of_plain)


def _requests_apart(message: AddRequests) -> list[Any]:
    return [_request_apart(request) for request in message.requests]


def _request_apart(request: EngineRequest) -> tuple[Any, Any]:
    params = request.params
    if params.logits_processors:
        raise UnsupportedError(
            f"logits_processors holds {shown(params.logits_processors)}, and code cannot be sent to the "
            'engine\'s process; use engine="thread", or the blocking Runtime'
        )
    return _values(request, REQUEST), _values(params, PARAMS)


def _requests_together(values: Any) -> AddRequests:
    return AddRequests(
        requests=tuple(
            EngineRequest(params=SamplingParams(**_named(PARAMS, params)), **_named(REQUEST, request))
            for request, params in values
        )
    )


CODECS: Mapping[int, _Codec] = {
    1: _Codec(
        AddRequests,
        _requests_apart,
        _requests_together,
        _decoder(GenericAlias(tuple, (GenericAlias(tuple, (_kinds(REQUEST), _kinds(PARAMS))), ...))),
    ),
    2: _of_dataclass(AbortRequests),
    3: _of_dataclass(Call),
    4: _of_dataclass(Shutdown),
    5: _of_dataclass(Start),
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
    23: _of_dataclass(ProcessEnded),
}
CODES = {codec.kind: code for code, codec in CODECS.items()}


def _names() -> str:
    return ", ".join(f"{code} ({codec.kind.__name__})" for code, codec in CODECS.items())
