"""Kernels built ahead of a start on a CPU: those that it calls, no others, and none where none may be."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import json, sys
from lamina import Runtime, SamplingParams
from lamina.custom_ops._shared import build
from lamina.runtime.startup import prebuild

ahead, kernels_ahead = [], prebuild.kernels_ahead
prebuild.kernels_ahead = lambda resolved: ahead.extend(kernels_ahead(resolved)) or ahead
settings = json.loads(sys.argv[2])
with Runtime.from_pretrained(sys.argv[1], device="cpu", **settings) as runtime:
    text = runtime.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].token_ids
used = sorted({one.op for one in build.LEDGER.used if one.kind == "kernels"})
print(json.dumps({"ahead": sorted(ahead), "used": used, "tokens": list(text)}))
"""


def start(
    folder: Path, cache_dir: Path, environment: dict[str, str] | None = None, **settings: object
) -> dict[str, list]:
    """What a process of its own was to build ahead, called and answered, with a cache that may be empty."""
    command = [
        sys.executable,
        "-c",
        START,
        str(folder),
        json.dumps({"cache_dir": str(cache_dir), **settings}),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("quantization", [None, "q4"])
def test_what_is_built_ahead_is_what_a_start_calls(make_tiny_folder, tmp_path, quantization):
    folder = make_tiny_folder(hidden_size=128, intermediate_size=256, head_dim=32)
    settings = {"compile": False, "quantization": quantization}
    first = start(folder, tmp_path, **settings)
    assert {*first["used"]} - {"thread_pool"} == {*first["ahead"]}
    assert start(folder, tmp_path, require_warm=True, **settings) == {**first, "ahead": []}


@pytest.mark.long
def test_a_compiler_that_is_not_there_is_met_by_whoever_wants_a_kernel(tiny_folder, tmp_path):
    settings = {"compile": False, "attention": "reference"}
    without = start(tiny_folder, tmp_path, {"CXX": "/nowhere/c++"}, **settings)
    assert without["used"] == []
    assert without["ahead"] == ["adjust_logits", "linear", "sample"]
