"""What native code this process uses, in which store it is kept, and who is asked before any is built."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from ...common.errors import StoreError
from ...common.store import Store

KERNELS = "kernels"  # the store's names for built libraries
TRITON = "triton"  # the folder in which Triton keeps what it compiles

Watcher = Callable[[str], None]  # called with what is about to be built; may raise
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """A built kernel that this process has loaded: its key below `kind`, and the op it is of."""

    kind: str
    key: str
    op: str


class Ledger:
    """Native code is loaded once a process, whichever runtime asks, and kept in the store asked for last."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._used: dict[tuple[str, str], Used] = {}

    @property
    def store(self) -> Store:
        """Where kernels are looked for and kept."""
        if self._store is None:
            self._store = Store()
        return self._store

    @property
    def used(self) -> tuple[Used, ...]:
        """What was loaded so far, in order."""
        return tuple(self._used.values())

    def keep_in(self, store: Store) -> None:
        """Use another store from now on; what is loaded already is copied to it."""
        before, self._store = self._store, store
        if before is None or before.root == store.root:
            return
        for used in self.used:
            if used.kind == KERNELS:
                _copy(used.key, before, store)

    def note(self, kind: str, key: str, op: str) -> None:
        """Remember that a kernel was loaded."""
        self._used[kind, key] = Used(kind=kind, key=key, op=op)


def _copy(key: str, source: Store, target: Store) -> None:
    facts = source.read_ref(KERNELS, key)
    if facts is None or target.read_ref(KERNELS, key) is not None:
        return
    # lost meanwhile, or no room: whoever needs it next builds it
    with contextlib.suppress(StoreError, KeyError, TypeError), target.using():
        target.put(source.get(facts["object"]))
        target.write_ref(KERNELS, key, facts)


LEDGER = Ledger()


def before_build(what: str) -> None:
    """Ask whoever watches; to be called before a compiler is started."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(what)


@contextlib.contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Have a watcher asked before anything is built inside the block."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)
