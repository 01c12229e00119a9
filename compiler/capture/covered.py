"""Whose code needs no description in a cache key, since a version or the hash of our own sources is in it."""

import functools
import sys
import sysconfig
import types
from pathlib import Path

import torch

from ... import custom_ops

# Of an op, what a trace goes through; its kernels and their selection are not part of a piece.
TRACED_OP_FILES = ("op.py", "reference.py", "precision.py")
PACKAGES = ("torch", "torchgen", "functorch", "builtins")
INSTALLED = ("/site-packages/", "/dist-packages/")


@functools.cache
def own_sources() -> frozenset[Path]:
    """The files of ours that every plan depends on: the compiler, and of an op what a trace goes through."""
    home = Path(custom_ops.__file__).resolve().parent.parent
    ops = (path for name in TRACED_OP_FILES for path in (home / "custom_ops").rglob(name))
    return frozenset([*(home / "compiler").rglob("*.py"), *ops])


@functools.lru_cache(maxsize=4096)
def is_covered_file(file: str) -> bool:
    """Whether the code of a file is that of a version of Python or torch, or among our hashed sources."""
    if file.startswith(("<frozen ", f"{Path(torch.__file__).parent}/")):
        return True
    library = f"{sysconfig.get_path('stdlib')}/"
    if file.startswith(library) and not any(part in file for part in INSTALLED):
        return True
    return Path(file).resolve() in own_sources()


def is_covered(value: type | types.FunctionType) -> bool:
    """Whether a function or class needs no description; what was made by exec always does."""
    if isinstance(value, types.FunctionType):
        return is_covered_file(value.__code__.co_filename)
    first = value.__module__.partition(".")[0]
    if first not in PACKAGES and (first not in sys.stdlib_module_names or first == "__main__"):
        return False
    found: object = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def is_covered_module(name: str) -> bool:
    """Whether a module is of a version of Python or torch."""
    first = name.partition(".")[0]
    return first in PACKAGES or (first in sys.stdlib_module_names and first != "__main__")
