"""Adapters by the names that callers give them, and who else may know where one of a name lies."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ...common.errors import LoadError, RequestError, UnknownAdapterError, shown
from ...common.logging import get_logger
from ..validation import text

ENTRY_POINTS = "lamina.adapters"  # where installed packages offer functions that find adapters
logger = get_logger("runtime")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedAdapter:
    """An adapter that requests may name."""

    name: str
    path: str  # of its folder
    digest: str  # of its bytes
    rank: int  # the largest of a module
    modules: tuple[str, ...]  # that it changes


class AdapterNames(Mapping[str, LoadedAdapter]):
    """The adapters of one runtime, by name: those that it has loaded and not unloaded."""

    def __init__(self) -> None:
        self._by_name: dict[str, LoadedAdapter] = {}

    def __getitem__(self, name: str) -> LoadedAdapter:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._by_name])

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> LoadedAdapter:
        """The adapter of that name. UnknownAdapterError where none is loaded."""
        found = self._by_name.get(name)
        if found is None:
            known = ", ".join(self._by_name) or "none is"
            raise UnknownAdapterError(
                f"adapter is {shown(name)}; wanted one that is loaded ({known}), or load_adapter() first"
            )
        return found

    def require(self, name: str | None, load: Callable[[str, Path], object]) -> None:
        """Have one of that name loaded if installed packages know it; UnknownAdapterError where none is."""
        if name is not None and name not in self and (path := find_adapter(name)) is not None:
            load(name, path)
        self.digest_of(name)

    def digest_of(self, name: str | None) -> str | None:
        """The digest by which a request names the adapter to the core; None for none."""
        return None if name is None else self.find(name).digest

    def add(self, name: str, path: str, facts: Mapping[str, Any]) -> LoadedAdapter:
        """Have an adapter known by a name, with what the core says of it.

        RequestError for the name of another one.
        """
        added = LoadedAdapter(
            name=name,
            path=path,
            digest=facts["digest"],
            rank=facts["rank"],
            modules=tuple(facts["modules"]),
        )
        before = self._by_name.get(name)
        if before is not None and before.digest != added.digest:
            raise RequestError(
                f"adapter {shown(name)} is loaded already, from {before.path}; unload it first, or use "
                "another name"
            )
        self._by_name[name] = added
        return added

    def remove(self, name: str) -> str | None:
        """Forget a name; the digest that no other name has then, if so. UnknownAdapterError for no name."""
        digest = self.find(name).digest
        del self._by_name[name]
        is_left = any(other.digest == digest for other in self._by_name.values())
        return None if is_left else digest

    def unload(self, name: str, forget: Callable[[str], object]) -> None:
        """Forget a name, and have its adapter forgotten by its digest where it has no other."""
        digest = self.remove(name)
        if digest is not None:
            forget(digest)


def checked_path(name: object, path: object) -> str:
    """The folder of an adapter that is to be loaded. RequestError for what is no name, or no path."""
    if not text("name", name):
        raise RequestError("name is ''; wanted what requests are to call the adapter")
    if not isinstance(path, (str, Path)) or not str(path):
        raise RequestError(f"path is {shown(path)}; wanted the folder of an adapter")
    return str(Path(path).expanduser().absolute())


def find_adapter(name: str) -> Path | None:
    """Where an adapter lies, by the first installed function that knows; None where nobody does.

    The functions are entry points of the group lamina.adapters: each takes a name and returns a folder, or
    None. LoadError where one fails.
    """
    for entry in sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        try:
            found = entry.load()(name)
        except Exception as error:  # a package of somebody else's
            raise LoadError(f"{entry.value} failed to find adapter {shown(name)}: {shown(error)}") from error
        if found is not None:
            logger.info("adapter %s is at %s, says %s", shown(name), found, entry.value)
            return Path(found)
    return None
