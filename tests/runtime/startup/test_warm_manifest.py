"""A start that is known to be warm: what is missing is named, and nothing is compiled, traced or built."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lamina import CompileConfig, NotWarmError, Runtime, SamplingParams
from lamina.common.progress import say_nothing
from lamina.common.store import Store
from lamina.compiler.torch_internals import torch_compat
from lamina.custom_ops._shared.ledger import before_build
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.startup.loader import missing

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parent.parent.parent.parent
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SERVE = """
import json, sys
BANNED = ("torch._dynamo", "torch._inductor", "sympy", "triton")
class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(BANNED):
            raise AssertionError(f"{name} was imported")
sys.meta_path.insert(0, Guard())
from lamina import Runtime, SamplingParams
with Runtime.from_pretrained(sys.argv[1], device="cpu", cache_dir=sys.argv[2], require_warm=True) as runtime:
    outputs = runtime.generate([[1, 2, 3], [4]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


def lacks(folder, cache, **settings):
    """What a start would have to make, and to measure."""
    found = missing(RuntimeConfig(model=folder, device="cpu", cache_dir=cache, **settings), say_nothing)
    return [*found.missing, *found.unmeasured]


@pytest.fixture(scope="module")
def warm(tiny_folder, tmp_path_factory, forget_kernels):
    """A cache that served TINY and nothing else, as tests count and remove what it holds; and its tokens."""
    cache = tmp_path_factory.mktemp("warm")
    forget_kernels()
    with Runtime.from_pretrained(tiny_folder, device="cpu", cache_dir=cache) as runtime:
        runtime.warm_up()
        outputs = runtime.generate([[1, 2, 3], [4]], GREEDY)
        return cache, [list(output.outputs[0].token_ids) for output in outputs]


def test_an_empty_cache_lacks_the_plan_and_a_warm_up(tiny_folder, tmp_path):
    said = lacks(tiny_folder, tmp_path)
    assert said == ["the plan: the cache holds no plan yet", *said[1:]]
    assert said[1:] == ["a warm-up with these settings: the cache holds no warm-up yet"]
    with pytest.raises(NotWarmError, match=r"lacks the plan.*run `lamina warmup`|is not in the cache"):
        Runtime.from_pretrained(tiny_folder, device="cpu", cache_dir=tmp_path, require_warm=True)


def test_what_was_warmed_up_lacks_nothing_and_other_settings_are_named(tiny_folder, warm):
    cache, _ = warm
    assert lacks(tiny_folder, cache) == []
    for sizes in ({"max_num_seqs": 3}, {"max_num_batched_tokens": 64}, {"block_size": 4}):
        assert lacks(tiny_folder, cache, **sizes) == []  # the same plan and kernels serve them
    said = lacks(tiny_folder, cache, numerics="exact")
    assert "differs in" in said[0]
    assert "numerics" in said[0]
    said = lacks(tiny_folder, cache, quantization="int8")
    assert "parameters" in said[0]  # of the plan
    assert "quantization" in said[1]


def test_serving_from_a_warm_cache_needs_no_compiler_of_any_kind(tiny_folder, warm, tmp_path):
    cache, tokens = warm
    for name in ("cc", "c++", "g++", "gcc", "clang++", "nvcc", "ptxas"):
        tool = tmp_path / name
        tool.write_text("#!/bin/sh\necho a compiler was started >&2\nexit 1\n")
        tool.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")}
    environment |= {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", SERVE, str(tiny_folder), str(cache)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == tokens
    assert "a compiler was started" not in result.stderr


@pytest.mark.parametrize("kind", ["kernels", "pieces", "plans", "objects"])
def test_whatever_is_lost_is_named_and_made_again(tiny_folder, warm, kind, forget_kernels):
    cache, tokens = warm
    store = Store(cache)
    if kind == "objects":
        (plan,) = store.refs("plans").values()
        (store.root / "objects" / plan["record"][:2] / plan["record"][2:]).unlink()
    elif kind == "kernels":  # the store may hold others, that this process has loaded for other tests
        (warm_up,) = store.refs("serving").values()
        (store.root / "refs" / kind / f"{warm_up[kind][0]}.json").unlink()
    else:
        next((store.root / "refs" / kind).iterdir()).unlink()
    said = lacks(tiny_folder, cache)
    assert len(said) == 1
    assert ("kernel of" if kind == "kernels" else "plan") in said[0]
    forget_kernels()
    with Runtime.from_pretrained(tiny_folder, device="cpu", cache_dir=cache) as runtime:
        assert [
            list(out.outputs[0].token_ids) for out in runtime.generate([[1, 2, 3], [4]], GREEDY)
        ] == tokens
    assert lacks(tiny_folder, cache) == []


def test_what_is_built_after_the_start_is_counted_and_explained(tiny_folder, monkeypatch):
    with Runtime.from_pretrained(tiny_folder, device="cpu", compile=False) as runtime:
        build_in_next_step(runtime, monkeypatch)
        runtime.generate([1], GREEDY)
        assert runtime.stats()["compile"]["recompiles"] == 1
        assert "built in the middle of a request: the kernel of something" in runtime.explain()


def test_what_is_built_after_the_start_is_an_error_in_strict_mode(tiny_folder, warm, monkeypatch):
    cache, _ = warm
    strict = CompileConfig(strict=True)
    with Runtime.from_pretrained(tiny_folder, device="cpu", compile=strict, cache_dir=cache) as runtime:
        assert runtime.generate([1, 2, 3], GREEDY)
        build_in_next_step(runtime, monkeypatch)
        with pytest.raises(NotWarmError, match=r"the kernel of something was not ready.*lamina warmup"):
            runtime.generate([1], GREEDY)


def build_in_next_step(runtime, monkeypatch):
    """Have the next step ask for a kernel that is not there."""
    core = runtime._open.core
    step = core.step

    def building():
        monkeypatch.undo()
        before_build("the kernel of something")
        return step()

    monkeypatch.setattr(core, "step", building)


@pytest.mark.slow
def test_a_cache_removed_while_the_process_lives_is_compiled_again(tiny_folder, tmp_path, forget_kernels):
    for dtype in ("float32", "bfloat16"):
        forget_kernels()
        with Runtime.from_pretrained(
            tiny_folder, device="cpu", cache_dir=tmp_path / "cache", dtype=dtype
        ) as runtime:
            assert runtime.generate([[1, 2, 3]], GREEDY)
            assert runtime.stats()["compile"]["compiled"] == 3
        shutil.rmtree(tmp_path / "cache")


def test_headers_of_another_folder_or_of_one_that_is_gone_are_made_again(tmp_path):
    made = []

    def precompile(name):
        made.append(name)
        return len(made)

    for folder in ("a", "a", "b", "a"):
        (tmp_path / folder).mkdir(exist_ok=True)
        torch_compat._memo_of_headers(tmp_path / folder, precompile)("header")
    assert len(made) == 2
    (tmp_path / "a").rmdir()
    assert torch_compat._memo_of_headers(tmp_path / "a", precompile)("header") == 3
