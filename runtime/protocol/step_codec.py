"""Plans and outputs of steps as tuples for msgspec: arrays as bytes, a request's parameters made once."""

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from types import GenericAlias, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...common.errors import LaminaError
from ..sampling_params import SamplingParams
from .fields import PARAMS, kinds_of, named, values_of
from .scheduler_output import SAMPLING, TokenHistory

DTYPES: dict[int, "np.dtype[Any]"] = {
    1: np.dtype(np.int64),
    2: np.dtype(np.int32),
    3: SAMPLING,
    4: np.dtype(np.bool_),
}
CODES: dict[Any, int] = {dtype: code for code, dtype in DTYPES.items()}
TABLE = 16  # added to the code of an array of three rows
MOST_PARAMS = 4096  # requests whose parameters are kept as they were made, or taken apart

_taken_apart: dict[int, tuple[SamplingParams, bytes]] = {}  # by id
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(kinds_of(PARAMS))


def array_as_ext(array: NDArray[Any]) -> msgspec.msgpack.Ext:
    """An array of one of DTYPES, [n] or [3, n], as msgpack has it."""
    code = CODES[array.dtype] + (TABLE if array.ndim == 2 else 0)
    return msgspec.msgpack.Ext(code, array.tobytes())


def array_of_ext(code: int, data: memoryview) -> NDArray[Any]:
    """The array again, in memory of its own."""
    array: NDArray[Any] = np.frombuffer(data, DTYPES[code % TABLE]).copy()
    return array.reshape(3, -1) if code >= TABLE else array


def taken_apart(value: Any) -> Any:
    """A plan, an output or a part of one as tuples, arrays and plain values."""
    kind = type(value)
    if kind is SamplingParams:
        return _params_as_bytes(value)
    if kind is tuple and value and dataclasses.is_dataclass(value[0]):
        return tuple(map(taken_apart, value))
    if not dataclasses.is_dataclass(kind):
        return value
    return tuple(taken_apart(getattr(value, name)) for name in _names(kind))


def put_together(kind: Any, values: Any) -> Any:
    """What was taken apart, of this dataclass."""
    if values is None:
        return None
    makers = zip(_names(kind), _makers(kind), values, strict=True)
    return kind(**{name: value if make is None else make(value) for name, make, value in makers})


def apart_kind(kind: Any) -> Any:
    """The type of what a value of this type is taken apart into, for a decoder."""
    if kind is SamplingParams:
        return bytes
    if kind is TokenHistory:  # of requests whose own code no other process has
        return None
    if kind is Exception:
        return LaminaError
    if dataclasses.is_dataclass(kind):
        return GenericAlias(tuple, tuple(apart_kind(field.type) for field in dataclasses.fields(kind)))
    if get_origin(kind) in (np.ndarray, NDArray):  # from numpy 2.5 on an alias is its own origin
        return np.ndarray
    if get_origin(kind) in (Union, UnionType):
        return Union[tuple(apart_kind(each) for each in get_args(kind))]  # noqa: UP007
    if get_origin(kind) is tuple and dataclasses.is_dataclass(get_args(kind)[0]):
        return GenericAlias(tuple, (apart_kind(get_args(kind)[0]), ...))
    return kind


@lru_cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@lru_cache
def _makers(kind: Any) -> tuple[Callable[[Any], Any] | None, ...]:
    """How each field's value is put together again; None for what stays as it was decoded."""
    return tuple(_maker(field.type) for field in dataclasses.fields(kind))


def _maker(kind: Any) -> Callable[[Any], Any] | None:
    parts = get_args(kind)
    if SamplingParams in parts:
        return lambda each: tuple(map(_params_of_bytes, each))
    if get_origin(kind) is tuple and dataclasses.is_dataclass(parts[0]):
        return lambda each: tuple(put_together(parts[0], values) for values in each)
    own = next((part for part in (kind, *parts) if dataclasses.is_dataclass(part)), None)
    return None if own in (None, TokenHistory) else lambda values: put_together(own, values)


def _params_as_bytes(params: SamplingParams) -> bytes:
    known = _taken_apart.get(id(params))
    if known is None or known[0] is not params:
        if len(_taken_apart) >= MOST_PARAMS:
            _taken_apart.clear()
        known = _taken_apart[id(params)] = params, _encoder.encode(values_of(params, PARAMS))
    return known[1]


@lru_cache(MOST_PARAMS)
def _params_of_bytes(data: bytes) -> SamplingParams:
    return SamplingParams(**named(PARAMS, _decoder.decode(data)))
