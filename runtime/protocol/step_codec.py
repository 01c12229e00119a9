"""What msgspec cannot read of a step by itself: arrays, and what repeats from step to step, made once."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ..sampling_params import SamplingParams
from .fields import PARAMS, kinds_of, named, values_of
from .scheduler_output import SAMPLING, SchedulerOutput
from .worker_messages import ExecuteStep

DTYPES: dict[int, "np.dtype[Any]"] = {
    1: np.dtype(np.int64),
    2: np.dtype(np.int32),
    3: SAMPLING,
    4: np.dtype(np.bool_),
}
CODES: dict[Any, int] = {dtype: code for code, dtype in DTYPES.items()}
TABLE = 16  # a bit that is set in the code of an array of three rows
MOST_PARAMS = 4096  # requests whose parameters are kept as they were made, or taken apart
STEP = tuple[int, int, SchedulerOutput, bytes, tuple[bytes, ...]]  # what step_apart() makes of a message

_taken_apart: dict[int, tuple[SamplingParams, bytes]] = {}  # by id
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(kinds_of(PARAMS))


def array_as_ext(array: NDArray[Any]) -> msgspec.msgpack.Ext:
    """An array of one of DTYPES, [n] or [3, n], as msgpack has it. TypeError for any other dtype."""
    code = CODES.get(array.dtype)
    if code is None:
        raise TypeError(f"an array is of {array.dtype}; wanted one of {', '.join(map(str, CODES))}")
    return msgspec.msgpack.Ext(code | (TABLE if array.ndim == 2 else 0), array.tobytes())


def array_of_ext(code: int, data: memoryview) -> NDArray[Any]:
    """The array again, in memory of its own. ValueError for what array_as_ext() does not make."""
    dtype = DTYPES.get(code & ~TABLE)
    if dtype is None:
        raise ValueError(f"an array is of kind {code}; wanted one of {', '.join(map(str, DTYPES))}")
    array: NDArray[Any] = np.frombuffer(data, dtype).copy()
    return array.reshape(3, -1) if code & TABLE else array


def step_apart(message: ExecuteStep) -> tuple[Any, ...]:
    """A message with the requests' ids, and the parameters of those that are adjusted, beside its plan."""
    plan, adjusted = message.plan, message.plan.adjusted
    params: tuple[bytes, ...] = ()
    if adjusted is not None:
        params = tuple(map(_params_as_bytes, adjusted.params))
        adjusted = replace(adjusted, params=())
    rest = replace(plan, request_ids=(), adjusted=adjusted)
    return message.number, message.known_failure, rest, _ids_as_bytes(plan.request_ids), params


def step_together(values: tuple[Any, ...]) -> ExecuteStep:
    """The message again."""
    number, known_failure, plan, ids, params = values
    adjusted = plan.adjusted
    if params:
        adjusted = replace(adjusted, params=tuple(map(_params_of_bytes, params)))
    plan = replace(plan, request_ids=_ids_of_bytes(ids), adjusted=adjusted)
    return ExecuteStep(number=number, known_failure=known_failure, plan=plan)


class _Kept:
    """What was made of a value, for as long as the next is equal: most steps are of the same requests."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make
        self._last: tuple[Any, Any] = None, None

    def __call__(self, value: Any) -> Any:
        last, made = self._last
        if value is not last and value != last:
            made = self._make(value)
            self._last = value, made
        return made


_ids_as_bytes = _Kept(_encoder.encode)
_ids_of_bytes = _Kept(msgspec.msgpack.Decoder(tuple[str, ...]).decode)


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
