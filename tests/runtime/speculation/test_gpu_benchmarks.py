"""The benchmarks of drafts on GPUs run to their end on what a runtime is made of now."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
FEW = ("tiny", "--device", "cpu", "--batches", "2", "--tokens", "24", "--repeats", "1")


@pytest.mark.long
@pytest.mark.parametrize("script", ["gpu_speculation.py", "gpu_eagle.py"])
def test_they_draft_and_some_drafts_hold(script, tmp_path, compile_cache):
    output = tmp_path / "found.json"
    places = "--cache-dir", str(compile_cache), "--output", str(output)
    subprocess.run([sys.executable, str(BENCHMARKS / script), *FEW, *places], check=True)
    found = json.loads(output.read_text())["batch 2"]
    assert found["plain"] > 0 < found["drafting"]
    assert 0 < found["accepted_tokens"] < found["draft_tokens"]
