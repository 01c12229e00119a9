"""Modules that an extra of the package installs: imported when needed, a missing one named with its extra."""

from importlib import import_module
from types import ModuleType

from .errors import UnsupportedError


def require(module: str, *, extra: str) -> ModuleType:
    """Returns a module that an extra installs; UnsupportedError, naming that extra, where it is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the module is there, and something that it needs is not
        raise UnsupportedError(
            f"this needs the package {error.name}, which is not installed; pip install 'lamina[{extra}]'"
        ) from error
