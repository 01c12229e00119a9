"""Progress of loading on standard error: a bar on a terminal, one line a stage elsewhere."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Show = Callable[[str, float, str], None]


@contextlib.contextmanager
def loading_progress() -> Iterator[Show]:
    """A callable (stage, fraction 0..1, detail) that shows where loading stands."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with _bar(console) as show:
            yield show
    else:
        yield _line_per_stage(console.print)


@contextlib.contextmanager
def _bar(console: "Console") -> Iterator[Show]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<10}"), BarColumn(), TextColumn("{task.fields[detail]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("start", total=1.0, detail="")

        def show(stage: str, fraction: float, detail: str) -> None:
            progress.update(task, description=stage, completed=fraction, detail=detail)

        yield show


def _line_per_stage(write: Callable[[str], None]) -> Show:
    last = ""

    def show(stage: str, fraction: float, detail: str) -> None:
        nonlocal last
        if stage != last:
            write(f"{stage} {detail}".rstrip())
        last = stage

    return show
