"""The folder that a checkpoint is written to: it appears whole, or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ...common import scratch
from ...common.errors import ConfigError, StoreError
from .source import CONFIG_NAME


def check_output(output: Path, model: Path, *, overwrite: bool) -> None:
    """Raise ConfigError where a folder may not be written there: it would lose files, or the model itself.

    What is replaced must look like a model: files alone, config.json among them.
    """
    target, source = output.resolve(), model.resolve()
    if target == source or source in target.parents:
        raise ConfigError(f"output is {output}, which is inside of the model {model}; wanted another place")
    if target in source.parents:
        raise ConfigError(f"output is {output}, which holds the model {model}; wanted another place")
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise ConfigError(f"output is {output}, which is a file; wanted a folder, or a name that is not used")
    entries = list(target.iterdir())
    if entries and not overwrite:
        raise ConfigError(f"output is {output}, which holds files; wanted an empty folder, or overwrite=True")
    names = {entry.name for entry in entries if entry.is_file()}
    if entries and (CONFIG_NAME not in names or len(names) < len(entries)):
        raise ConfigError(
            f"output is {output}, and overwrite is True, but it holds other things than a model's files; "
            "wanted a folder of files with config.json among them, which alone is replaced"
        )


@contextlib.contextmanager
def new_folder(output: Path, num_bytes: int, *, overwrite: bool) -> Iterator[Path]:
    """A folder beside the output to write into, which takes the output's name at the end of the block.

    However else the block ends, nothing is left of it; what a killed process left goes at the next call.
    Raises StoreError where there is no room for so many bytes, or nothing may be written.
    """
    target = output.resolve()
    beside = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch.sweep(beside)
        free = shutil.disk_usage(target.parent).free
        if free < num_bytes:
            raise StoreError(
                f"{target.parent} has {free / 1e9:.2f} GB free, and {num_bytes / 1e9:.2f} GB are to be "
                "written; make room, or write elsewhere"
            )
        with scratch.private_folder(beside) as folder:
            new = folder / "new"
            new.mkdir()
            yield new
            _take_name(new, target, folder / "old", overwrite=overwrite)
    except OSError as error:
        raise StoreError(f"{output} cannot be written: {error.strerror or error}; write elsewhere") from error
    finally:
        with contextlib.suppress(OSError):
            beside.rmdir()


def _take_name(new: Path, target: Path, old: Path, *, overwrite: bool) -> None:
    """Let the target be what was written. StoreError where somebody else has filled it meanwhile."""
    if not target.is_dir() or not any(target.iterdir()):
        new.replace(target)
        return
    if not overwrite:
        raise StoreError(f"{target} was filled meanwhile by somebody else; nothing of it was touched")
    target.replace(old)
    try:
        new.replace(target)
    except BaseException:
        old.replace(target)
        raise
