"""What newcomers and contributors type works as it is written: README, examples, make, failing tests."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py"))


def run(*command, **options):
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False, **options
    )


# Each in a process of its own, a fork of one that has imported what they import.
EACH = """
import json, os, runpy, sys, tempfile
import lamina.runtime.async_runtime, lamina.runtime.runtime
paths, found = sys.argv[1:], {}
for path in paths:
    errors = tempfile.TemporaryFile("w+")
    child = os.fork()
    if not child:
        os.dup2(errors.fileno(), 2)
        sys.argv = [path]
        runpy.run_path(path, run_name="__main__")
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    errors.seek(0)
    found[path] = code, errors.read()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def of_examples():
    """By its path, the exit code and the errors of an example without arguments."""
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"}
    result = run("-c", EACH, *EXAMPLES, cwd="/", env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_without_arguments_says_how_it_is_used(of_examples, example):
    code, errors = of_examples[str(example)]
    assert code != 0
    assert "MODEL" in errors or "usage:" in errors
    assert "Traceback" not in errors


@pytest.mark.long
@pytest.mark.demo
@pytest.mark.timeout(900)  # the first of all to use the model compiles it
@pytest.mark.usefixtures("demo_model")
def test_the_snippet_of_the_readme_answers_as_it_stands():
    """With the model that the README names; from the root, as it says."""
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert "max_tokens" in snippet
    result = run("-c", snippet, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout


def test_the_readme_names_the_model_that_make_fetches_and_how_to_enter_the_environment():
    model = re.search(r"^MODEL := (.*)$", MAKEFILE, re.MULTILINE)
    assert README.count(model.group(1)) >= 3
    assert "source .venv/bin/activate" in README
    assert "pip install ." in README


def test_make_shows_the_progress_of_pip_and_no_list_of_kernels():
    install = next(line for line in MAKEFILE.splitlines() if "pip install" in line)
    assert "--quiet" not in install
    assert all(
        line.strip().startswith("@")
        for line in MAKEFILE.splitlines()
        if "$(KERNELS)" in line and "\t" in line
    )


def test_make_help_has_a_line_for_every_target():
    targets = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE).group(1).split()
    # As typed by a person: a make around the tests would add lines about the folders it enters.
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    shown = subprocess.run(
        ["make", "help"], cwd=ROOT, env=surroundings, capture_output=True, text=True, check=True
    ).stdout
    assert sorted(line.split()[0] for line in shown.splitlines()) == sorted(targets)
    assert all(len(line.split()) > 2 for line in shown.splitlines())


def test_a_failing_test_is_not_drowned_in_traces_of_torch(tmp_path):
    path = tmp_path / "test_it.py"
    path.write_text(
        "import logging\n"
        "def test_it():\n"
        "    logging.getLogger('torch.__trace').setLevel(logging.DEBUG)\n"
        "    logging.getLogger('torch.__trace').debug('a ' + 'trace')\n"
        "    logging.getLogger('lamina').warning('a warning')\n"
        "    assert False\n"
    )
    config = ("-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-p", "no:cacheprovider")
    result = run("-m", "pytest", *config, path)
    assert result.returncode == 1
    assert "a warning" in result.stdout
    assert "a trace" not in result.stdout
