"""Responses by their ids: those that run, and those that are kept for a while; each key has its own."""

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from .errors import ApiError

OVERHEAD = 1024  # bytes that are counted for a response beside its text


@dataclass(kw_only=True, slots=True, eq=False)
class Stored:
    """A response: as it stands, and the conversation that may go on from it."""

    key: str  # the name of its owner
    id: str
    response: bytes  # as JSON
    turns: bytes  # messages without instructions, as JSON; with the answer once that is written
    is_kept: bool  # after it has ended
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None

    @property
    def num_bytes(self) -> int:
        """What it takes in memory, about."""
        return len(self.response) + len(self.turns) + OVERHEAD


class Responses:
    """All responses of a server; used in its loop alone."""

    def __init__(self, *, max_bytes: int, seconds: float) -> None:
        """max_bytes: of one key's; the oldest make room. seconds: for which one is kept."""
        self._max_bytes, self._seconds = max_bytes, seconds
        self._running: dict[tuple[str, str], Stored] = {}
        self._kept: dict[str, OrderedDict[str, Stored]] = {}  # by key, the oldest first
        self._num_bytes: Counter[str] = Counter()  # of a key's kept ones

    @property
    def num_running(self) -> int:
        """Responses that are being written."""
        return len(self._running)

    def begin(self, response: Stored) -> None:
        """Has a response found while it runs, and after that if it is kept."""
        self._running[response.key, response.id] = response
        if response.is_kept:
            self._kept.setdefault(response.key, OrderedDict())[response.id] = response
            self._num_bytes[response.key] += response.num_bytes
            loop = asyncio.get_running_loop()
            response.timer = loop.call_later(self._seconds, self.forget, response)
            self._make_room(response.key)

    def check_room(self, num_bytes: int) -> None:
        """Raises ApiError 400 for a response that would not be kept."""
        if num_bytes + OVERHEAD > self._max_bytes:
            message = f"store is true, but the conversation takes {num_bytes + OVERHEAD} bytes"
            message += f"; wanted at most {self._max_bytes} (max_stored_bytes), or store left out"
            raise ApiError(status=400, message=message, param="store")

    def end(self, response: Stored, *, answer: bytes, turns: bytes) -> None:
        """Notes how a response ended: what is answered for it, and the conversation with it."""
        before = response.num_bytes
        response.response, response.turns = answer, turns
        if self.kept(response.key, response.id):
            self._num_bytes[response.key] += response.num_bytes - before
        self._running.pop((response.key, response.id), None)
        response.ended.set()
        self._make_room(response.key)

    def running(self, key: str, response_id: str) -> Stored | None:
        """Returns the response of this key that runs under an id, kept or not."""
        return self._running.get((key, response_id))

    def kept(self, key: str, response_id: str) -> Stored | None:
        """Returns the stored response of this key with an id."""
        mine = self._kept.get(key)
        return None if mine is None else mine.get(response_id)

    def find(self, key: str, response_id: str) -> Stored:
        """Returns the stored response of this key with an id; ApiError 404 where there is none."""
        found = self.kept(key, response_id)
        if found is None:
            message = f"no response {response_id[:128]!r} of this key is stored; it was asked without "
            message += "store: true, its time has passed, or newer ones took its room"
            raise ApiError(status=404, message=message, param="id", code="response_not_found")
        return found

    def forget(self, response: Stored) -> None:
        """Keeps a response no longer; it is written to its end if it runs."""
        if self.kept(response.key, response.id) is None:
            return
        if response.timer is not None:
            response.timer.cancel()
        del self._kept[response.key][response.id]
        self._num_bytes[response.key] -= response.num_bytes
        if not self._kept[response.key]:
            del self._kept[response.key], self._num_bytes[response.key]

    def drop(self, response: Stored) -> None:
        """Forgets a response that has not come to be."""
        self.forget(response)
        self._running.pop((response.key, response.id), None)
        response.ended.set()

    def num_bytes(self, key: str) -> int:
        """Returns what a key's stored responses take in memory, about."""
        return self._num_bytes[key]

    def _make_room(self, key: str) -> None:
        """Forgets the oldest of a key until the rest fits; the newest stays."""
        while self._num_bytes[key] > self._max_bytes and len(self._kept[key]) > 1:
            self.forget(next(iter(self._kept[key].values())))
