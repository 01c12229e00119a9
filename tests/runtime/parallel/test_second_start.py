"""Ranks in processes of their own: one of them compiles for all, and a second start compiles nothing."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lamina import Runtime, SamplingParams

from ...families import FAMILIES

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
MANY = SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True, detokenize=False)
PROMPTS = [[5, 9, 301], [7] * 11 + [44, 3], [8, 3], [9]]


def start(folder: Path, **settings: Any) -> tuple[Any, dict[str, int]]:
    """The tokens of a prompt, and what all ranks together have compiled, loaded and built late."""
    with Runtime.from_pretrained(folder, tensor_parallel=2, num_kv_blocks=64, **settings) as runtime:
        tokens = runtime.generate([[5, 9, 301]], GREEDY)[0].outputs[0].token_ids
        ranks = runtime._loaded.executor.collective_rpc("worker_stats")
    assert len(ranks) == 2
    counts = Counter[str]()
    for rank in ranks:
        counts.update({name: rank["compile"][name] for name in ("compiled", "loaded", "recompiles")})
    return tokens, dict(counts)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_one_compile_serves_all_ranks_and_the_next_start(tmp_path: Path, compile_cache: Path) -> None:
    # Every piece has a norm, and no other test this epsilon: all share the cache.
    folder = FAMILIES["llama-chunks"].save(tmp_path, rms_norm_eps=7e-5)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cache_dir": compile_cache}
    tokens, first = start(folder, **settings)
    assert first == {"compiled": 3, "loaded": 3, "recompiles": 0}
    again, second = start(folder, require_warm=True, **settings)
    assert second == {"compiled": 0, "loaded": 6, "recompiles": 0}
    assert again == tokens


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_stages_load_the_plan_of_the_whole_model(
    tensor_parallel: int, tmp_path: Path, compile_cache: Path
) -> None:
    # Every piece has a norm, and no other test this epsilon: all share the cache.
    folder = FAMILIES["qwen3-tied"].save(tmp_path, rms_norm_eps=8e-5)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cache_dir": compile_cache}
    settings["num_kv_blocks"] = 64
    with Runtime.from_pretrained(folder, tensor_parallel=tensor_parallel, **settings) as runtime:
        wanted = [one.outputs[0].token_ids for one in runtime.generate(PROMPTS, MANY)]
    settings |= {"tensor_parallel": tensor_parallel, "pipeline_parallel": 2, "require_warm": True}
    with Runtime.from_pretrained(folder, **settings) as runtime:
        assert [one.outputs[0].token_ids for one in runtime.generate(PROMPTS, MANY)] == wanted
        ranks = runtime._loaded.executor.collective_rpc("worker_stats")
    assert len(ranks) == 2 * tensor_parallel
    for rank in ranks:
        assert (rank["compile"]["compiled"], rank["compile"]["recompiles"]) == (0, 0)
        assert rank["cpu_call_graphs"]["replays"] > 0
