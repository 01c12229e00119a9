"""Progress of loading on standard error: a row a stage on a terminal, lines elsewhere."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

Show = Callable[[str, float, str], None]

COMPILES = "capture"  # the stage that only a start which compiles has
NOTICE = (
    "compiling for this model and these settings, once: about a minute on two free cores; "
    "later starts load what it makes"
)
SHOWN_EACH = ("compile", "kernels", "verify")  # stages of few, long parts, each of which gets a line
STEP = 0.25  # of the others, at which they get a line


@contextlib.contextmanager
def loading_progress() -> Iterator[Show]:
    """A callable (stage, fraction 0..1, detail) that shows where loading stands, from any thread."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if console.is_terminal:
        with _rows(console) as rows:
            yield _announcing(console.print, rows.show)
    else:
        lines = Lines(write=console.print)
        yield _announcing(console.print, lines.show)
        lines.end()


def _announcing(write: Callable[[str], None], show: Show) -> Show:
    """The same, with NOTICE before the first stage of compiling."""
    is_announced = False

    def announced(stage: str, fraction: float, detail: str) -> None:
        nonlocal is_announced
        if stage == COMPILES and not is_announced:
            is_announced = True
            write(NOTICE)
        show(stage, fraction, detail)

    return announced


@contextlib.contextmanager
def _rows(console: "Console") -> Iterator["Rows"]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<10}"), BarColumn(), TimeElapsedColumn())
    detail = TextColumn("{task.fields[detail]}", markup=False)
    with Progress(*columns, detail, console=console, transient=True) as progress:
        yield Rows(progress=progress)


@dataclass(kw_only=True, slots=True)
class Rows:
    """A row a stage, with a clock of its own that runs from its first word to its end.

    A stage ends when it says that all of it is done, or when the thread that began it begins another one.
    """

    progress: "Progress"
    live: dict[str, "TaskID"] = field(default_factory=dict)
    begun_by: dict[int, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def show(self, stage: str, fraction: float, detail: str) -> None:
        """Take in where a stage is; its bar never goes back."""
        with self.lock:
            if stage not in self.live:
                self._begin(stage, detail)
            task = self.progress.tasks[self.progress.task_ids.index(self.live[stage])]
            if fraction > 0:  # before, nobody knows how much there is: the bar only moves
                self.progress.update(task.id, total=1.0, completed=max(task.completed, min(fraction, 1.0)))
            self.progress.update(task.id, detail=detail)
            if fraction >= 1:
                del self.live[stage]

    def _begin(self, stage: str, detail: str) -> None:
        thread = threading.get_ident()
        before = self.live.pop(self.begun_by.get(thread, ""), None)
        if before is not None:
            self.progress.update(before, total=1.0, completed=1.0)
        self.begun_by[thread] = stage
        self.live[stage] = self.progress.add_task(stage, total=None, detail=detail)


@dataclass(kw_only=True, slots=True)
class Lines:
    """Lines of a log: each stage when it begins, each part of those that are long, with seconds so far."""

    write: Callable[[str], None]
    started: float = field(default_factory=time.monotonic)
    shown: dict[str, float] = field(default_factory=dict)  # the furthest of each stage that has a line
    last: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def show(self, stage: str, fraction: float, detail: str) -> None:
        """Write a line, if it says anything new."""
        with self.lock:
            is_new = (
                detail != self.last.get(stage) if stage in SHOWN_EACH else self._is_further(stage, fraction)
            )
            if is_new:
                self.shown[stage], self.last[stage] = fraction, detail
                part = f"{fraction:.0%}" if fraction > 0 and stage not in SHOWN_EACH else ""
                self._line(" ".join(filter(None, (stage, part, detail))))

    def end(self) -> None:
        """Say that all is done."""
        self._line("ready")

    def _is_further(self, stage: str, fraction: float) -> bool:
        return stage not in self.shown or int(fraction / STEP) > int(self.shown[stage] / STEP)

    def _line(self, text: str) -> None:
        self.write(f"{time.monotonic() - self.started:6.1f} s  {text}")
