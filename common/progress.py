"""Progress callbacks of long work."""

from collections.abc import Callable

Progress = Callable[[str, float, str], None]  # stage, fraction done from 0 to 1, detail


def say_nothing(stage: str, fraction: float, detail: str) -> None:
    """The Progress that reports nothing."""
