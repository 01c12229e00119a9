"""docs/request_walk.md names what a decode step enters, in order, and what is entered calls nothing above."""

import re
import sys
from pathlib import Path

import pytest

import lamina
from lamina import SamplingParams

RUNTIME = Path(lamina.__file__).parent / "runtime"
PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "request_walk.md"
MAY_CALL = {
    "engine": {"scheduler", "executor", "tokenization"},
    "scheduler": {"kv_cache"},
    "kv_cache": set(),
    "executor": {"worker"},
    "worker": {"startup"},  # where the callable of an eager model is made, which calls attention
    "startup": {"worker"},
    "tokenization": set(),
    "protocol": set(),
}


@pytest.fixture
def entered(open_runtime, tiny_text_folder):
    """The files of runtime/ that a decode step enters, each call as (from, to), to None from elsewhere."""
    runtime, calls = open_runtime(tiny_text_folder, max_num_seqs=4), []
    stream = runtime.stream("hello", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop="zz"))
    for _ in range(5):
        next(stream)

    def within(frame):
        path = Path(frame.f_code.co_filename)
        return path.relative_to(RUNTIME).as_posix() if path.is_relative_to(RUNTIME) else None

    def trace(frame, kind, argument):
        if within(frame) is not None:
            calls.append((within(frame.f_back), within(frame)))

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        runtime._client.step()
    finally:
        sys.settrace(before)
    stream.close()
    return calls


def test_the_page_names_every_file_that_a_decode_step_enters_in_order(entered):
    files = [file for file in dict.fromkeys(to for _, to in entered) if not file.startswith("startup/")]
    section = PAGE.read_text().split("## A decode step, file by file")[1].split("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("|")]
    named = [found.group(1) for row in rows if (found := re.search(r"\]\(\.\./runtime/([\w/]+\.py)\)", row))]
    assert files == named, "what is entered has changed: change the table of docs/request_walk.md likewise"


def test_what_a_decode_step_enters_calls_nothing_above_it(entered):
    rooms = {(from_.split("/")[0], to.split("/")[0]) for from_, to in entered if from_ is not None}
    upwards = {(from_, to) for from_, to in rooms if to not in MAY_CALL[from_] | {from_, "protocol"}}
    assert not upwards
    main = {to for _, to in rooms} - {"protocol", "startup", "kv_cache", "tokenization"}
    assert main == {"engine", "scheduler", "executor", "worker"}
