"""What a core in a process of its own says beside its outputs: how far it has come, and how it ended."""

from dataclasses import dataclass

from ...common.errors import LaminaError


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The first thing that the process is told: what to load."""

    settings: bytes  # pickled, as they hold what callers hold
    log_level: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadProgress:
    """What a Progress is called with."""

    stage: str
    fraction: float
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderFound:
    """Where the checkpoint lies, long before it is loaded: its tokenizer can be read meanwhile."""

    folder: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreLost:
    """It cannot be loaded, or it did not survive a step: the process ends."""

    error: LaminaError
