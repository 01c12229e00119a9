"""A KV cache in int8 on a CPU: what is served with it as requests come and go; its bytes, its names."""

import pytest
import torch

from lamina import Runtime
from lamina.common.errors import UnsupportedError
from lamina.runtime.startup import memory
from lamina.runtime.startup.identity import system_fingerprint

from ..families import FAMILIES
from .known_answers import (
    assert_swapping_changes_no_token,
    assert_traffic_changes_no_token,
    distance_of_kernels,
    logprobs,
)

WIDE = {"dtype": "float64", "compile": False, "kv_cache_dtype": "int8"}
NAMES = ["llama-chunks", "qwen3", "gemma2"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: FAMILIES[name].save(tmp_path_factory.mktemp(name)) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_requests_get_their_own_tokens_together_in_chunks_after_hits_and_preemptions(folders, name):
    """In float64, whose rounding lets no number fall to another side of a whole one."""
    assert_traffic_changes_no_token(folders[name], WIDE, keeps_all=name == "qwen3")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_and_the_formula_give_the_same_likelihoods(folders, name, dtype):
    """What is rounded may differ by one step where sums differ in their last place."""
    distance = distance_of_kernels(folders[name], dtype=dtype, kv_cache_dtype="int8")
    assert distance < (0.001 if dtype == "float32" else 0.1)


def test_int8_is_a_finer_rounding_than_fp8(folders):
    for name in NAMES:
        found = {}
        for kv_cache_dtype in ("auto", "int8", "fp8"):
            settings = {**WIDE, "kv_cache_dtype": kv_cache_dtype}
            with Runtime.from_pretrained(folders[name], max_model_len=128, **settings) as runtime:
                found[kv_cache_dtype] = logprobs(runtime)
        of_int8, of_fp8 = ((found[each] - found["auto"]).abs().mean() for each in ("int8", "fp8"))
        assert 0 < of_int8 < of_fp8 / 2, name


def test_blocks_that_go_to_the_host_and_back_take_their_scales_along(tiny_folder):
    block = 4 * 2 * 2 * 2 * (16 + 4)  # tokens, layers, keys and values, heads, head_dim and scale
    assert_swapping_changes_no_token(tiny_folder, WIDE, block)


def test_a_cache_of_given_bytes_holds_more_tokens_and_answers_are_told_apart(tiny_folder, monkeypatch):
    monkeypatch.setattr(memory, "CPU_CACHE_BYTES", 1 << 20)
    held, known = {}, set()
    for kv_cache_dtype in ("auto", "int8"):
        settings = {"compile": False, "dtype": "float32", "kv_cache_dtype": kv_cache_dtype}
        with Runtime.from_pretrained(tiny_folder, **settings) as runtime:
            held[kv_cache_dtype] = runtime.stats()["blocks"]["total"] + 1
            known.add(system_fingerprint(runtime._loaded))
    assert held["int8"] == held["auto"] * 4 * 16 // (16 + 4)
    assert len(known) == 2


def test_a_gpu_is_refused_by_name(tiny_folder):
    from lamina.runtime.config import RuntimeConfig
    from lamina.runtime.startup.resolve import _cache_dtype

    config = RuntimeConfig(model=tiny_folder, kv_cache_dtype="int8")
    with pytest.raises(UnsupportedError, match="kv_cache_dtype is 'int8' and device cuda; wanted a cpu"):
        _cache_dtype(config, torch.bfloat16, torch.device("cuda"))
