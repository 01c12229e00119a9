"""What tests of admission ask with: a clock, keys, connections, and the books that are kept."""

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace

from starlette.requests import Request

from lamina.serving.admission.admission import Admission
from lamina.serving.auth.key import Entry, Key
from lamina.serving.auth.limits import Limits, Meter
from lamina.serving.config import ServeConfig
from lamina.serving.lifecycle import Lifecycle


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Published:
    """What a lease asks of a generation."""

    request_id: str
    num_output_tokens: int = 0
    num_closed: int = 0

    async def aclose(self) -> None:
        self.num_closed += 1


class Connection:
    """A request whose body was read, and its client's end of the line."""

    def __init__(self, key: Key, headers: dict[str, str] | None = None, request_id: str = "x") -> None:
        self.gone = asyncio.Event()
        raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {"type": "http", "headers": raw, "lamina.key": key, "lamina.request_id": request_id}

        self.request = Request(scope, self._receive)

    async def _receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}


def key(name: str = "a", clock: Clock | None = None, priority: int = 0, models=None, **limits) -> Key:
    entry = Entry(name=name, digest=b"", limits=Limits(**limits), priority=priority, models=models)
    return Key(entry=entry, meter=Meter(entry.limits, clock or Clock()))


def admission(*, max_num_seqs: int = 2, clock: Clock | None = None, keys=("a", "b"), **config) -> Admission:
    """One that admits `max_num_seqs` and half as many again."""
    lifecycle = Lifecycle()
    lifecycle.ready()
    return Admission(
        ServeConfig(model_names=("tiny",), **config),
        lifecycle,
        SimpleNamespace(names=keys),
        SimpleNamespace(max_num_seqs=max_num_seqs, abort=_end_nothing),
        clock=clock or Clock(),
    )


async def _end_nothing(request_id: str) -> bool:
    """As of a runtime whose requests are ended by tests."""
    return True


def ask(books: Admission, connection: Connection, num_sequences: int = 1, num_prompt_tokens: int = 1, **more):
    return books.admit(
        connection.request,
        num_sequences=num_sequences,
        num_prompt_tokens=num_prompt_tokens,
        **more,
    )


def is_empty(books: Admission) -> bool:
    held = (books._held, books._waiting, books._at, books._by_request, books._num_held, books.num_waiting)
    return not any(held)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)
