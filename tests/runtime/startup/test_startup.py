"""How a runtime starts: what it says, what the stages cost, with and without a compiler, cold and warm."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lamina import Runtime, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ROOT = Path(__file__).resolve().parent.parent.parent.parent
SCRIPT = """
from lamina import Runtime, SamplingParams
runtime = Runtime.from_pretrained({folder!r}, device="auto", cache_dir={cache!r}, compile={compile})
print(runtime.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids)
stats = runtime.stats()
print(stats["compile"]["pieces"], stats["compile"]["compiled"], stats["compile"]["loaded"])
slow = ("torch._dynamo", "torch._inductor", "sympy", "transformers", "llguidance", "jinja2", "gguf",
        "huggingface_hub", "safetensors.torch", "lamina.runtime.weight_group", "lamina.testing")
import sys; print([name for name in slow if name in sys.modules])
"""
NO_COMPILER = """
from lamina import KernelBuildError, Runtime
settings = dict(device="cpu", cache_dir={cache!r}, compile=False)
with Runtime.from_pretrained({folder!r}, **settings) as runtime:
    print(runtime.stats()["resolved"]["attention"])
    print(len(runtime.generate([[1], [2, 3]])))
try:
    Runtime.from_pretrained({folder!r}, attention="cpu", **settings)
except KernelBuildError as error:
    print(error)
"""


def test_the_stages_of_the_start_add_up_to_what_the_caller_waited(tiny_folder):
    """In the best of five starts: a busy machine may stop a start between two stages."""
    unnamed, idle = [], []
    for _ in range(5):
        started = time.perf_counter()
        with Runtime.from_pretrained(tiny_folder, compile=False) as runtime:
            waited = time.perf_counter() - started
            stages = runtime.stats()["startup"]
        apart = ("imports", "first_token", "overlapped")
        named = sum(seconds for stage, seconds in stages.items() if stage not in apart)
        assert stages["overlapped"].keys() == {"weights", "tokenizer", "kernels"}, (
            "not all that is read meanwhile is apart"
        )
        unnamed.append(abs(waited - named) - 0.05 * waited)
        idle.append(stages["weights"] - stages["overlapped"]["weights"])
    assert min(unnamed) <= 0.02
    assert min(idle) <= 0.02, "waited for longer than it took"


def test_stats_have_every_name_that_is_promised(open_runtime):
    runtime = open_runtime()
    runtime.generate([[1], [2, 3]], GREEDY)
    promised = {
        "blocks": {"total", "free", "cached", "used"},
        "requests": {"waiting", "running", "finished"},
        "prefix_cache": {"queried_tokens", "hit_tokens"},
        "latency": {"first_token", "between_tokens"},
        "compile": {"pieces", "unique_pieces", "compiled", "loaded", "recompiles", "seconds"},
        "cpu_call_graphs": {"replays"},
        "cuda_graphs": {"sizes", "replays", "eager_steps", "padded_tokens", "bytes"},
        "startup": {
            *("imports", "config", "weights", "capture", "compile", "load", "cuda_graphs", "first_token"),
            *("kernels", "overlapped"),
        },
        "resolved": {
            *("eos_token_ids", "sampling_defaults", "rope", "max_model_len", "dtype", "attention", "device"),
        },
    }
    stats = runtime.stats()
    assert isinstance(stats["preemptions"], int)
    missing = {name: wanted - stats[name].keys() for name, wanted in promised.items()}
    assert not any(missing.values()), missing


def test_without_a_compiler_attention_falls_back_with_one_line_an_op(tiny_folder, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    result = run_script(tiny_folder, tmp_path / "cache", NO_COMPILER, PATH=str(folder))
    assert result.returncode == 0, result.stderr
    attention, answers, error = result.stdout.splitlines()
    assert (attention, answers) == ("reference", "2")
    assert re.search(r"no C\+\+ compiler.*install g\+\+ or set CXX", error)
    lines = [line for line in result.stderr.splitlines() if "no C++ compiler" in line]
    assert len([line for line in lines if ": paged_attention" in line]) == 1
    assert len(lines) == len(set(lines))


def run_script(folder, cache, script=SCRIPT, compile=True, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != "CXX"}
    return subprocess.run(
        [sys.executable, "-c", script.format(folder=str(folder), cache=str(cache), compile=compile)],
        env=inherited | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(600)
def test_a_script_without_a_main_guard_runs_and_the_next_process_compiles_nothing(
    tiny_folder, compile_cache, tmp_path
):
    first = run_script(tiny_folder, compile_cache, TMPDIR=str(tmp_path))
    assert first.returncode == 0, first.stderr
    second = run_script(tiny_folder, compile_cache, TMPDIR=str(tmp_path), LAMINA_LOG_LEVEL="INFO")
    assert second.returncode == 0, second.stderr
    assert second.stdout.splitlines() == [first.stdout.splitlines()[0], "3 0 3", "[]"]
    assert second.stderr.count("device: ") == 1, "auto says once on which device it runs"
    assert list(tmp_path.iterdir()) == [], "temporary files were left"


def test_compiling_without_a_compiler_names_it_and_the_remedy(tiny_folder, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    result = run_script(tiny_folder, tmp_path / "cache", PATH=str(folder))
    assert result.returncode != 0
    assert "CompileError" in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert "C++ compiler" in last
    assert "compile=False" in last
