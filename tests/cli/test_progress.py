"""Progress goes to standard error: a row and a clock for each stage on a terminal, lines elsewhere."""

import io
import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress

from lamina.cli import progress as module
from lamina.cli.progress import NOTICE, Rows, loading_progress

PIECES = [("compile", number / 3, f"piece {number + 1} of 3") for number in range(3)]


def told(err):
    """The lines without their seconds, which must not go back."""
    seconds = [float(match) for match in re.findall(r"^ *([\d.]+) s  ", err, re.MULTILINE)]
    assert seconds == sorted(seconds)
    return re.sub(r"^ *[\d.]+ s  ", "", err, flags=re.MULTILINE).splitlines()


def test_off_a_terminal_each_piece_is_told_and_compiling_is_announced_once(capsys):
    with loading_progress() as show:
        show("config", 0.0, "model")
        show("capture", 0.0, "tracing the model")
        for call in PIECES:
            show(*call)
            show("weights", 0.5, "model.safetensors")
    captured = capsys.readouterr()
    pieces = [f"compile {detail}" for _, _, detail in PIECES]
    assert told(captured.err) == [
        "config model",
        NOTICE,
        "capture tracing the model",
        pieces[0],
        "weights 50% model.safetensors",
        *pieces[1:],
        "ready",
    ]
    assert not captured.out


def test_a_start_that_compiles_nothing_announces_nothing(capsys):
    with loading_progress() as show:
        show("config", 0.0, "model")
        show("weights", 1.0, "")
    assert told(capsys.readouterr().err) == ["config model", "weights 100%", "ready"]


def test_many_small_parts_are_a_few_lines(capsys):
    with loading_progress() as show:
        for done in range(1, 273):
            show("convert", done / 272, f"blk.{done}")
    assert 4 <= len(told(capsys.readouterr().err)) <= 6


def test_a_start_that_fails_is_not_told_to_be_ready(capsys):
    def fail():
        with loading_progress() as show:
            show("config", 0.0, "model")
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert "ready" not in capsys.readouterr().err


def rows_at(now):
    console = Console(file=io.StringIO(), force_terminal=True)
    return Rows(progress=Progress(console=console, get_time=lambda: now[0], auto_refresh=False))


def clocks(rows):
    """What each row's clock shows, as rich's column for elapsed time does."""
    return [task.finished_time if task.finished else task.elapsed for task in rows.progress.tasks]


STAGES = st.sampled_from(["config", "convert", "capture", "compile", "weights", "kernels"])
CALLS = st.lists(st.tuples(STAGES, st.floats(0, 1), st.booleans()), min_size=1, max_size=40)


@given(CALLS)
def test_no_clock_jumps_back_no_bar_shrinks_and_the_newest_stage_runs(calls):
    now, shown, done = [0.0], [], []
    rows = rows_at(now)
    for stage, fraction, _ in calls:
        rows.show(stage, fraction, "")
        before, tasks = [*shown], rows.progress.tasks
        shown, bars = clocks(rows), [task.completed for task in tasks]
        assert all(new >= old for old, new in zip(before, shown, strict=False))
        assert all(new >= old for old, new in zip(done, bars, strict=False))
        done = bars
        now[0] += 1.0
        if fraction < 1:
            running = [task for task in tasks if not task.finished]
            assert [task.description for task in running] == [stage]
            assert running[0].elapsed == shown[tasks.index(running[0])] + 1


def test_a_stage_on_another_thread_runs_beside():
    now = [0.0]
    rows = rows_at(now)
    rows.show("capture", 0.0, "")
    thread = threading.Thread(target=rows.show, args=("weights", 0.5, ""))
    thread.start()
    thread.join()
    now[0] = 2.0
    rows.show("compile", 0.0, "piece 1 of 3")
    now[0] = 5.0
    assert [task.description for task in rows.progress.tasks] == ["capture", "weights", "compile"]
    assert clocks(rows) == [2.0, 5.0, 3.0]


def test_on_a_terminal_the_notice_stays_and_the_rows_go(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda **_: Console(file=out, force_terminal=True, width=200))
    with loading_progress() as show:
        show("capture", 0.0, "tracing the model")
        for call in PIECES:
            show(*call)
    assert NOTICE in out.getvalue()
    assert module.COMPILES in out.getvalue()
