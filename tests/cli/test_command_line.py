"""The command line from outside: what it prints where, and with which exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lamina import __version__
from lamina.cli import main

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"}


def lamina(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lamina", *arguments]
    settings = {"env": ENVIRONMENT, **options}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", **settings)


@pytest.fixture
def lamina_here(monkeypatch, capsys):
    """lamina_here(*arguments) -> the same as lamina(), in this process."""

    def run(*arguments):
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr(sys, "argv", ["lamina", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(arguments, ended.value.code or 0, *capsys.readouterr())

    return run


def test_a_process_prints_and_ends_as_the_command_does_here(lamina_here):
    """So that each case below need not start one."""
    for arguments in (("generate", "--help"), ("frobnicate",)):
        outside, here = lamina(*arguments), lamina_here(*arguments)
        assert (outside.returncode, outside.stdout) == (here.returncode, here.stdout)
        assert outside.stderr == here.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("generate",),
        ("chat",),
        ("warmup",),
        ("cache",),
        ("cache", "import"),
        ("explain",),
        ("info",),
        ("replay",),
        ("verify",),
    ],
)
def test_help_is_given_by_either_word(lamina_here, arguments):
    result = lamina_here(*arguments, "--help")
    assert result.returncode == 0
    assert "Usage: lamina" in result.stdout
    assert lamina_here(*arguments, "-h").stdout == result.stdout


def test_the_version_is_printed():
    assert lamina("--version").stdout == f"lamina {__version__}\n"


def test_help_imports_neither_torch_nor_transformers():
    code = (
        "import sys; sys.argv = ['lamina', 'generate', '--help']\n"
        "from lamina.cli import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=ENVIRONMENT, check=False)
    assert result.returncode == 0, result.stderr


def test_info_names_the_machine_and_the_cache(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "lamina", "info", "--json"],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, "LAMINA_CACHE_DIR": str(tmp_path)},
        check=True,
    )
    facts = json.loads(result.stdout)
    assert facts["cache_dir"] == str(tmp_path)
    assert facts["versions"]["torch"]
    assert facts["cores"] >= 1


def test_info_is_whole_lines_in_a_pipe(tmp_path):
    text = lamina(
        "info", env=ENVIRONMENT | {"LAMINA_CACHE_DIR": str(tmp_path / ("x" * 150)), "COLUMNS": "20"}
    )
    rows = dict(line.split(maxsplit=1) for line in text.stdout.splitlines())
    assert {"cpu", "isa", "versions"} <= rows.keys()
    assert rows["cache_dir"] == str(tmp_path / ("x" * 150))


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("generate", "hello"), "--model"),
        (("chat",), "MODEL"),
        (("warmup",), "MODEL"),
        (("explain",), "MODEL"),
        (("verify",), "MODEL"),
        (("warmup", "somewhere", "--check", "--attention", "zzz"), "'zzz' is not one of 'auto'"),
        (("info", "somewhere", "--dtype", "bf16"), "'bf16' is not one of 'auto', 'bfloat16'"),
        (("generate", "--model", "somewhere"), "PROMPT"),
        (("generate", "--model", "somewhere", "--max-tokens", "many", "hello"), "--max-tokens"),
        (("generate", "--model", "somewhere", "--frobnicate", "hello"), "--frobnicate"),
        (("generate", "--model", "somewhere", "--logprobs", "2", "hello"), "--json"),
        (("frobnicate",), "frobnicate"),
    ],
)
def test_wrong_usage_is_named_and_ends_with_2(lamina_here, arguments, said):
    result = lamina_here(*arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    "option, value", [("--top-p", "7"), ("--temperature", "-1"), ("--max-tokens", "-1"), ("--n", "0")]
)
def test_impossible_sampling_is_refused_before_loading(lamina_here, option, value):
    result = lamina_here("generate", "--model", "/no/such/model", option, value, "hello")
    assert result.returncode == 2
    assert result.stderr.startswith(f"lamina: {option} is {value}")
    assert "Traceback" not in result.stderr
