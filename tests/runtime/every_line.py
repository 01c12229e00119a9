"""Something that happens at one line, or call, of the runtime's own code, and how many of them there are."""

import contextlib
import sys
from pathlib import Path

import lamina

ENGINE = str(Path(lamina.__file__).parent / "runtime")


@contextlib.contextmanager
def traced(trace):
    """Under a trace function."""
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def happening(what, place, event="line"):
    """A trace function that lets something happen at the place-th line (or call) from now on."""
    left = [place]

    def trace(frame, kind, argument):
        if not frame.f_code.co_filename.startswith(ENGINE):
            return None
        if kind == event:
            left[0] -= 1
            if left[0] == 0:
                what()
        return trace

    return trace


def raising(error):
    """A thing to happen: an error of that class."""

    def happen():
        raise error("at a line")

    return happen


def count(action, event="line"):
    """Lines (or calls) of the runtime's own code that something takes."""
    passed = [0]

    def trace(frame, kind, argument):
        if not frame.f_code.co_filename.startswith(ENGINE):
            return None
        passed[0] += kind == event
        return trace

    with traced(trace):
        action()
    return passed[0]
