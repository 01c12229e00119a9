"""Libraries that Inductor has built: under their name once they are whole, whatever ends the compiler."""

import shlex
import subprocess
import sys

import pytest
from torch._inductor import cpp_builder

from lamina.compiler.torch_internals.torch_fixes import builds_are_whole

# Writes half of its target, then the folder of its own files, if it is to live so long.
COMPILER = """
import os, signal, sys
file = open(sys.argv[sys.argv.index("-o") + 1], "w")
file.write("half")
file.flush()
if sys.argv[1] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
file.write(" and " + os.environ["TMPDIR"])
"""


@pytest.fixture
def build(tmp_path, monkeypatch):
    """build(what the compiler does) -> the path of what it has built, by the name that CppBuilder calls."""
    program = tmp_path / "compiler.py"
    program.write_text(COMPILER)
    monkeypatch.setattr(
        cpp_builder,
        "run_compile_cmd",
        lambda cmd_line, cwd: subprocess.run(shlex.split(cmd_line), cwd=cwd, check=True),
    )

    def run(does):
        target = tmp_path / "built" / "lib.so"
        target.parent.mkdir(exist_ok=True)
        command = shlex.join([sys.executable, str(program), does, "-o", str(target)])
        with builds_are_whole():
            cpp_builder.run_compile_cmd(command, cwd=str(tmp_path))
        return target

    return run


def test_a_compiler_that_dies_leaves_no_library(build, tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        build("dies")
    assert not list((tmp_path / "built").iterdir())


def test_a_compilers_own_files_lie_beside_what_it_builds(build, tmp_path):
    target = build("lives")
    assert target.read_text() == f"half and {tmp_path}"
    assert list(target.parent.iterdir()) == [target]


def test_a_command_without_a_target_runs_as_it_is(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(cpp_builder, "run_compile_cmd", lambda cmd_line, cwd: ran.append((cmd_line, cwd)))
    with builds_are_whole():
        cpp_builder.run_compile_cmd("c++ --version", cwd="/")
    assert ran == [("c++ --version", "/")]
