"""From start to close: what a runtime leaves behind (nothing), and what it survives."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from lamina import ClosedError, Runtime, SamplingParams, UnsupportedError
from lamina.custom_ops import build
from lamina.runtime.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8]]
ROOT = Path(__file__).resolve().parent.parent.parent


def tokens_of(runtime, prompts=PROMPTS):
    return [output.outputs[0].token_ids for output in runtime.generate(prompts, GREEDY)]


def test_closing_twice_is_harmless_and_use_after_it_says_so(tiny_folder):
    runtime = Runtime.from_pretrained(tiny_folder, compile=False)
    runtime.close()
    runtime.close()
    for use in (runtime.stats, runtime.explain, lambda: runtime.generate([1]), lambda: runtime.stream([1])):
        with pytest.raises(ClosedError, match="closed"):
            use()


@pytest.mark.parametrize("how", ["close", "del", "with"])
def test_weights_and_cache_are_gone_when_the_runtime_is(tiny_folder, how):
    runtime = Runtime.from_pretrained(tiny_folder, compile=False)
    tokens_of(runtime)
    loaded = runtime._loaded  # the only way to what must die
    watched = [weakref.ref(tensor) for tensor in loaded.parts.weights.values()]
    watched += [weakref.ref(keys) for keys, _ in loaded.engine._model_runner._attention._caches]
    del loaded
    if how == "with":
        with runtime:
            pass
    elif how == "close":
        runtime.close()
    else:
        del runtime
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)


def test_five_models_in_one_process_take_the_memory_of_one(tiny_folder):
    def resident():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    sizes = []
    for _ in range(5):
        with Runtime.from_pretrained(tiny_folder, compile=False) as runtime:
            tokens_of(runtime)
        sizes.append(resident())
    assert sizes[-1] - sizes[1] < 16 << 20


def test_the_process_is_left_as_it_was(tiny_folder):
    def state():
        handlers = tuple(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM))
        return dict(os.environ), torch.get_default_dtype(), torch.get_num_threads(), os.getcwd(), handlers

    before, threads = state(), threading.active_count()
    with Runtime.from_pretrained(tiny_folder, compile=False) as runtime:
        tokens_of(runtime)
    assert state() == before
    assert threading.active_count() == threads


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_step_that_fails_frees_its_blocks_and_the_engine_goes_on(open_runtime, is_idle, monkeypatch, error):
    runtime = open_runtime()
    wanted = tokens_of(runtime)
    original, calls = ModelRunner.execute, []

    def fail_once(self, plan):
        calls.append(plan)
        if len(calls) == 3:
            raise error
        return original(self, plan)

    monkeypatch.setattr(ModelRunner, "execute", fail_once)
    with pytest.raises(error):
        runtime.generate(PROMPTS, GREEDY)
    is_idle(runtime)
    assert tokens_of(runtime) == wanted


def test_two_threads_share_one_runtime(open_runtime):
    runtime = open_runtime()
    wanted, found = tokens_of(runtime), {}
    workers = [
        threading.Thread(target=lambda name=name: found.update({name: tokens_of(runtime)})) for name in "ab"
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == {"a": wanted, "b": wanted}


def test_the_same_prompts_three_times_give_the_same_answers_in_order(open_runtime):
    runtime = open_runtime()
    prompts = [[1, 2, 3], [9], [1, 2, 3]]
    first = tokens_of(runtime, prompts)
    assert first[0] == first[2] != first[1]
    assert tokens_of(runtime, prompts) == tokens_of(runtime, prompts) == first


def test_the_stages_of_the_start_add_up_to_what_the_caller_waited(tiny_folder):
    started = time.perf_counter()
    with Runtime.from_pretrained(tiny_folder, compile=False) as runtime:
        waited = time.perf_counter() - started
        stages = runtime.stats()["startup"]
    named = sum(seconds for stage, seconds in stages.items() if stage not in ("imports", "first_token"))
    assert abs(waited - named) <= 0.05 * waited + 0.02


def test_stats_have_every_name_that_is_promised(open_runtime):
    runtime = open_runtime()
    tokens_of(runtime)
    promised = {
        "blocks": {"total", "free", "cached", "used"},
        "requests": {"waiting", "running", "finished"},
        "prefix_cache": {"queried_tokens", "hit_tokens"},
        "compile": {"pieces", "unique_pieces", "compiled", "loaded", "recompiles", "seconds"},
        "cuda_graphs": {"sizes", "replays", "eager_steps", "padded_tokens", "bytes"},
        "startup": {"imports", "config", "weights", "capture", "compile", "load", "graphs", "first_token"},
        "resolved": {
            *("eos_token_ids", "sampling_defaults", "rope", "max_model_len", "dtype", "attention", "device"),
        },
    }
    stats = runtime.stats()
    assert isinstance(stats["preemptions"], int)
    missing = {name: wanted - stats[name].keys() for name, wanted in promised.items()}
    assert not any(missing.values()), missing


def test_without_a_compiler_attention_falls_back_with_one_line(monkeypatch, tmp_path, said, tiny_folder):
    from lamina.custom_ops import registry

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("LAMINA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    registry._select_auto.cache_clear()
    registry._load.cache_clear()
    try:
        with Runtime.from_pretrained(tiny_folder, compile=False) as runtime:
            assert runtime.stats()["resolved"]["attention"] == "reference"
            assert len(tokens_of(runtime)) == 3
        with pytest.raises(build.KernelBuildError, match=r"no C\+\+ compiler"):
            Runtime.from_pretrained(tiny_folder, compile=False, attention="cpu")
    finally:
        registry._select_auto.cache_clear()
        registry._load.cache_clear()


def test_a_backend_that_cannot_run_here_is_refused(tiny_folder):
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    with pytest.raises(UnsupportedError, match="cuda"):
        Runtime.from_pretrained(tiny_folder, compile=False, attention="cuda")


SCRIPT = """
from lamina import Runtime, SamplingParams
runtime = Runtime.from_pretrained({folder!r}, device="auto", cache_dir={cache!r}, compile={compile})
print(runtime.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids)
print(runtime.stats()["compile"]["compiled"], runtime.stats()["resolved"]["device"])
import sys; print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""


def run_script(folder, cache, compile=True, **environment):
    source = SCRIPT.format(folder=str(folder), cache=str(cache), compile=compile)
    process = subprocess.run(
        [sys.executable, "-c", source],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return process.returncode, process.stdout.split("\n"), process.stderr


@pytest.mark.timeout(600)
def test_a_script_without_a_main_guard_runs_and_the_next_process_compiles_nothing(tiny_folder, tmp_path):
    code, first, errors = run_script(tiny_folder, tmp_path)
    assert code == 0, errors
    assert first[1].startswith("3 cpu") or first[1].startswith("3 cuda")
    code, second, errors = run_script(tiny_folder, tmp_path)
    assert code == 0, errors
    assert second[0] == first[0]
    assert second[1].split()[0] == "0"
    assert second[2] == "[]", "a warm start imported the compiler"


def test_compiling_without_a_compiler_names_the_remedy(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    code, _, errors = run_script(tiny_folder, tmp_path / "cache", PATH=str(tmp_path), CXX="")
    assert code != 0
    assert "compile=False" in errors


def test_auto_says_once_on_which_device_it_runs(tiny_folder, tmp_path):
    code, _, errors = run_script(tiny_folder, tmp_path, compile=False, LAMINA_LOG_LEVEL="INFO")
    assert code == 0
    assert errors.count("device: ") == 1
