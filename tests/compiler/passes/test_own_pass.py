"""The pass of docs/add_a_pass.md works, is keyed, reported and proved as the page says."""

import importlib.util
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from lamina.common.errors import ConfigError
from lamina.compiler import cache
from lamina.compiler.compile import plan_factors
from lamina.compiler.config import CompileConfig
from lamina.compiler.passes import pipeline
from lamina.compiler.passes.pipeline import PASS_NAMES
from lamina.testing import random_programs as programs

from ..tiny import make_tiny

PAGE = Path(__file__).resolve().parents[3] / "docs" / "add_a_pass.md"
PASS, _, PROOF = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def load(folder, text=PASS):
    path = folder / "double_negation.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("double_negation", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DOUBLE_NEGATION


@pytest.fixture
def own(tmp_path):
    return load(tmp_path)


def test_the_page_shows_less_than_forty_lines_of_pass_and_of_proof():
    assert max(len(text.splitlines()) for text in (PASS, PROOF)) < 40


def test_the_proof_holds(own, monkeypatch):
    for body in ("twice_negated", "negated_once"):
        monkeypatch.setitem(programs.BODIES, body, None)  # what the proof adds is gone after it
    namespace = {"DOUBLE_NEGATION": own, "__name__": "proof"}
    exec(compile(PROOF, str(PAGE), "exec"), namespace)
    namespace["test_double_negation"]()


@pytest.mark.long
def test_the_proof_copied_as_it_stands_holds_under_any_profile(tmp_path):
    """In a folder of one's own: without a profile of ours, Hypothesis has its own deadline."""
    (tmp_path / "test_proof.py").write_text(f"{PASS}\n\n{PROOF}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--rootdir",
        tmp_path,
        "-p",
        "no:cacheprovider",
        tmp_path,
    ]
    path = str(PAGE.parents[1] / "src")
    result = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout


def test_it_runs_before_lower_and_is_reported(own):
    steps = pipeline.select((*PASS_NAMES, own), "fast")
    assert [step.name for step in steps[-2:]] == ["double_negation", "lower"]
    graph = programs.trace(programs.Program(**PROGRAM)).graph
    assert pipeline.rewrite(graph, steps).reports[-2].name == "double_negation"


PROGRAM = {
    "steps": (programs.Step(kind="linear", eps=1e-5),),
    "dtype": programs.DTYPES[0],
    "hidden": 8,
    "intermediate": 3,
    "scale": 1.0,
    "seed": 0,
}


def test_alone_it_is_the_only_pass(own):
    assert pipeline.select((own,), "fast") == (own,)


def test_its_presence_its_code_and_its_version_change_the_key(own, tmp_path):
    (tmp_path / "edited").mkdir()
    edited = load(tmp_path / "edited", PASS.replace("matches += 1", "matches = matches + 1"))
    newer = replace(own, version=2)
    chosen = [None, *((*PASS_NAMES, step) for step in (own, edited, newer))]
    factors = [plan_factors(make_tiny().program, pipeline.select(steps, "fast"), "fast") for steps in chosen]
    assert len({cache.plan_key(each) for each in factors}) == 4


def test_the_place_of_its_file_does_not_change_the_key(own, tmp_path):
    (tmp_path / "moved").mkdir()
    assert pipeline.describe((load(tmp_path / "moved"),)) == pipeline.describe((own,))


def test_a_pass_that_no_key_could_hold_is_refused(own):
    with pytest.raises(ConfigError, match="two of the name 'double_negation'"):
        CompileConfig(passes=(own, replace(own, version=2)))
    with pytest.raises(ConfigError, match="two of the name 'lower'"):
        CompileConfig(passes=(replace(own, name="lower"),))
    lock = threading.Lock()
    with pytest.raises(
        ConfigError, match=r"'double_negation' depends on _thread.lock at it.* \(closed over\)"
    ):
        CompileConfig(passes=(replace(own, run=lambda graph: lock and own.run(graph)),))
    with pytest.raises(ConfigError, match=r"names \['fuse'\]; wanted names out of .*, or a Pass"):
        CompileConfig(passes=("fuse",))
