"""The process around a command: interrupts, standard streams, lost folders, users without a home."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"}
FEW = ("--no-compile", "--device", "cpu", "--max-tokens", "4", "--temperature", "0")


def start(*arguments, environment=None, **options):
    command = [sys.executable, "-m", "lamina", *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": "/"} | options
    return subprocess.Popen(command, env=ENVIRONMENT | (environment or {}), **options)


def run(*arguments, given=b"", **options):
    """Exit code, output and errors; the errors hold no traceback."""
    process = start(*arguments, **({"stdin": subprocess.PIPE} | options))
    out, err = process.communicate(given if process.stdin else None, timeout=240)
    assert b"Traceback" not in err, err.decode()
    return process.returncode, out, err.decode(errors="replace")


def told(errors):
    return [line for line in errors.splitlines() if line.startswith("lamina: ")]


INTERRUPTED_AT = """
import os, signal, sys
import lamina.__main__ as command

class Interrupting:
    left = int(sys.argv.pop())

    def find_spec(self, name, path=None, target=None):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
command.exit_on_interrupt()
command.main()
"""


@pytest.mark.parametrize("place", [1, 20, 60, 150, 400, 800, 1200, 1500])
def test_an_interrupt_while_everything_is_imported_ends_with_130(tiny_text_folder, place):
    """At so many modules from the first of ours on: before it there is Python alone."""
    arguments = ["generate", str(tiny_text_folder), "a", "--no-compile", str(place)]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED_AT, *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
    )
    _, errors = process.communicate(timeout=120)
    # Just before the end it is the signal that ends the process, which a shell reports as 130 as well.
    assert process.returncode in (130, -signal.SIGINT), errors
    assert b"Traceback" not in errors


def test_an_interrupt_in_a_long_prompt_ends_it_and_the_answer_comes_to_nothing(tiny_text_folder):
    from lamina import Runtime, SamplingParams
    from lamina.cli.streaming import print_stream

    with Runtime.from_pretrained(tiny_text_folder, compile=False, prefill_chunk=1) as runtime:
        step, count = runtime._loaded.core.step, 0

        def step_and_interrupt():
            nonlocal count
            count += 1
            if count == 3:
                os.kill(os.getpid(), signal.SIGINT)
            step()

        runtime._loaded.core.step = step_and_interrupt
        streamed = print_stream(runtime.stream([1] * 200, SamplingParams(max_tokens=4)))
        assert (streamed.interrupted, streamed.text, count) == (True, "", 3)
        runtime._loaded.core.step = step
        assert (
            len(
                runtime.generate([[1, 2]], SamplingParams(max_tokens=4, ignore_eos=True))[0]
                .outputs[0]
                .token_ids
            )
            == 4
        )


def test_output_that_cannot_hold_a_text_is_one_line(tiny_text_folder):
    """Of all ids of this model some are no ASCII; --json prints the prompt, too."""
    code, _, errors = run(
        "generate", tiny_text_folder, "é", *FEW, "--json", environment={"PYTHONIOENCODING": "ascii"}
    )
    assert code == 1
    assert len(told(errors)) == 1
    assert "standard output is ascii, which cannot hold" in told(errors)[0]
    assert "PYTHONIOENCODING=utf-8" in errors


@pytest.mark.parametrize("arguments", [("info", "--json"), ("cache", "list"), ("--version",)])
def test_a_full_output_is_one_line(arguments, tmp_path):
    with open("/dev/full", "wb") as full:
        code, _, errors = run(*arguments, stdout=full, environment={"LAMINA_CACHE_DIR": str(tmp_path / "c")})
    if arguments[0] == "cache" and code == 0:
        return  # an empty cache has nothing to list
    assert (code, told(errors)) == (1, ["lamina: standard output cannot be written: No space left on device"])


@pytest.mark.parametrize("arguments", [("info", "--json"), ("generate", "nowhere", "a")])
def test_a_closed_output_is_one_line_before_anything_is_done(arguments):
    code, _, errors = run(*arguments, preexec_fn=lambda: os.close(1))
    assert (code, errors) == (1, "lamina: standard output is closed; give it a file, or /dev/null\n")


def test_a_reader_that_went_away_is_one_line():
    read, write = os.pipe()
    os.close(read)
    code, _, errors = run("info", "--json", stdout=write)
    assert (code, told(errors)) == (1, ["lamina: standard output cannot be written: Broken pipe"])


def test_errors_that_nobody_wants_to_hear_change_nothing(tmp_path):
    code, out, _ = run("info", "--json", preexec_fn=lambda: os.close(2))
    assert code == 0
    assert out.startswith(b"{")


@pytest.mark.parametrize(
    "given, said",
    [(b"a\xff", "is no utf-8 text, as byte 0xff in it shows"), (None, "input is closed")],
)
@pytest.mark.parametrize("command, utf8", [("generate", "0"), ("generate", "1"), ("chat", "0")])
def test_input_that_is_no_text_is_one_line(tiny_text_folder, command, utf8, given, said):
    options = {"preexec_fn": lambda: os.close(0), "stdin": None} if given is None else {}
    words = ["-"] if command == "generate" else []
    code, _, errors = run(
        command, tiny_text_folder, *words, *FEW, given=given, environment={"PYTHONUTF8": utf8}, **options
    )
    lines = [line for line in told(errors) if "sampling" not in line]
    assert (code, len(lines)) == (2, 1)
    assert said in lines[0]


@pytest.mark.long
def test_where_the_current_folder_is_gone_it_is_said_and_work_goes_on(tiny_text_folder, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    code, out, errors = run(
        "generate",
        tiny_text_folder,
        "hello",
        *FEW,
        environment={"LAMINA_CACHE_DIR": str(tmp_path / "cache")},
        cwd=folder,
        preexec_fn=folder.rmdir,
    )
    assert (code, told(errors)) == (0, ["lamina: the current folder is gone; paths must begin with /"])
    assert out


NAMES = ("HOME", "XDG_CACHE_HOME", "LAMINA_CACHE_DIR")
ROOTS = """
import os, sys
from lamina.common import env
env.__file__ = "/elsewhere/common/env.py"  # as where it is installed
if {user}:
    os.setgroups([]), os.setgid({user}), os.setuid({user})
first, second = env.cache_root(), env.cache_root()
assert first == second and oct(first.stat().st_mode)[-3:] == "700", first
print(first)
"""


@pytest.mark.parametrize(
    "user, home",
    [(0, "file/below"), (54321, None), (54321, "/root"), (54321, "~nobody-there"), (54321, "")],
    ids=["a file", "unknown and none", "another's", "unknown name", "empty"],
)
def test_where_no_cache_can_be_kept_there_is_a_private_one_and_one_warning(tmp_path, user, home):
    if user and os.geteuid() != 0:
        pytest.skip("only root can be another user")
    (tmp_path / "file").write_text("")
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in NAMES}
    if home is not None:
        environment["HOME"] = str(tmp_path / home) if "/" in home and home[0] != "/" else home
    result = subprocess.run(
        [sys.executable, "-c", ROOTS.format(user=user)],
        env=environment,
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("no cache folder can be had") == 1
    assert not Path(result.stdout.strip()).exists()


def test_a_chosen_cache_that_cannot_be_is_an_error_with_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    code, _, errors = run("cache", "list", environment={"LAMINA_CACHE_DIR": str(tmp_path / "file" / "below")})
    assert code == 2
    assert len(told(errors)) == 1
    assert "LAMINA_CACHE_DIR" in errors
