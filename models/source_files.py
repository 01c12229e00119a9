"""The files that a model is written in, which a compiled one depends on."""

import inspect
import sys
from pathlib import Path
from types import ModuleType

from . import layers
from .registry import ModelDefinition


def source_files(definition: ModelDefinition) -> tuple[Path, ...]:
    """The file of a model's forward, those of its package or of ours that lend it functions, the layers."""
    modules: dict[str, ModuleType] = {layers.__name__: layers}
    own = inspect.getmodule(inspect.unwrap(definition.forward))
    if own is not None:
        _gather(own, modules)
    files = {inspect.getsourcefile(module) for module in modules.values()}
    return tuple(Path(file) for file in sorted(file for file in files if file is not None))


def _gather(module: ModuleType, known: dict[str, ModuleType]) -> None:
    """Add a module and, in turn, what it imports or imports functions from."""
    known[module.__name__] = module
    packages = {__package__, module.__package__} - {None, ""}
    for value in list(vars(module).values()):
        if not inspect.ismodule(value) and not inspect.isfunction(value):
            continue
        name = value.__name__ if inspect.ismodule(value) else value.__module__
        lender = sys.modules.get(name)
        is_near = any(name.startswith(f"{package}.") for package in packages)
        if lender is not None and is_near and name not in known:
            _gather(lender, known)
