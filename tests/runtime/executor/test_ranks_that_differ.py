"""Ranks that start otherwise than rank 0: an error before anything is served, which names both."""

import tempfile

import pytest

from lamina import Runtime
from lamina.common.errors import EngineError
from lamina.runtime import child_process

from ..asking import SMALL
from ..engine.processes import children, wait_until

# What rank 1 runs before its own program.
ON_RANK_1 = "import sys\nif int(sys.argv[2]) == 1: exec({fault!r})"
OTHER_CAPTURES = """
from lamina.runtime.startup import ranks
said = ranks._decisions
ranks._decisions = lambda worker: said(worker) | {"captures": "Decode(size=4)"}
"""
NO_CAPTURES = """
from lamina.runtime.startup import builder
def fails(runner, resolved, progress):
    raise ValueError("nothing can be captured here")
builder.new_cuda_graphs, builder.capture = lambda resolved: object(), fails
"""


@pytest.fixture
def start_with(tiny_text_folder, tmp_path, monkeypatch):
    """start_with(fault) starts two ranks, of which one has it; nothing of them is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, program = children(), "from lamina.runtime.MODULE import main; main()"
    assert program in child_process.BOOT

    def start(fault):
        prelude = f"exec({ON_RANK_1.format(fault=fault)!r}); "
        monkeypatch.setattr(child_process, "BOOT", child_process.BOOT.replace(program, prelude + program))
        Runtime.from_pretrained(tiny_text_folder, executor="multiproc", tensor_parallel=2, **SMALL).close()

    yield start
    wait_until(lambda: children() <= before)


def test_what_ranks_have_captured_otherwise_is_said_of_both(start_with):
    wanted = r"captures is '.*' on rank 0 and 'Decode\(size=4\)' on rank 1"
    with pytest.raises(EngineError, match=wanted):
        start_with(OTHER_CAPTURES)


def test_an_error_while_one_rank_captures_is_that_error_and_no_hang(start_with):
    with pytest.raises(EngineError, match="nothing can be captured here"):
        start_with(NO_CAPTURES)
