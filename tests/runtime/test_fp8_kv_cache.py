"""A KV cache in FP8: what is served with it, whatever comes, goes, or runs short; its bytes and its names."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamina import CompileConfig, Runtime
from lamina.common.errors import ConfigError, UnsupportedError
from lamina.models import AttentionSpec
from lamina.runtime.startup import memory
from lamina.runtime.startup.identity import system_fingerprint
from lamina.runtime.worker.attention import PagedAttention
from lamina.runtime.worker.host_blocks import HostBlocks

from ..families import FAMILIES
from .known_answers import (
    GREEDY,
    assert_swapping_changes_no_token,
    assert_traffic_changes_no_token,
    distance_of_kernels,
    logprobs,
    prompt,
    tokens,
)

WIDE = {"dtype": "float64", "compile": False, "kv_cache_dtype": "fp8"}
NAMES = ["llama-chunks", "mistral", "qwen3", "gemma2", "gemma3", "phi3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: FAMILIES[name].save(tmp_path_factory.mktemp(name)) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_requests_get_their_own_tokens_together_in_chunks_after_hits_and_preemptions(folders, name):
    """In float64, whose rounding lets no number fall to another side of FP8."""
    assert_traffic_changes_no_token(folders[name], WIDE, keeps_all=name == "qwen3")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_and_the_formula_give_the_same_likelihoods(folders, name, dtype):
    """What is rounded to FP8 may differ by one of its steps where sums differ in their last place."""
    distance = distance_of_kernels(folders[name], dtype=dtype, kv_cache_dtype="fp8")
    assert distance < (0.01 if dtype == "float32" else 0.15)


def test_fp8_is_another_rounding_and_not_another_model(folders):
    for name in NAMES:
        found = []
        for kv_cache_dtype in ("auto", "fp8"):
            settings = {**WIDE, "kv_cache_dtype": kv_cache_dtype}
            with Runtime.from_pretrained(folders[name], max_model_len=128, **settings) as runtime:
                found.append(logprobs(runtime))
        distance = (found[0] - found[1]).abs().mean()
        assert 0 < distance < 0.6, name


def test_blocks_that_go_to_the_host_and_back_hold_one_byte_a_number(tiny_folder):
    block = 4 * 2 * 2 * 2 * 16  # tokens, layers, keys and values, heads, head_dim
    assert_swapping_changes_no_token(tiny_folder, WIDE, block)


def test_compiled_and_eager_give_the_same_tokens_by_the_plan_of_any_cache(tiny_folder, compile_cache):
    settings = {"dtype": "float32", "numerics": "exact", "cache_dir": compile_cache}
    found, compiled = [], []
    for kv_cache_dtype, compile_ in (
        ("fp8", True),
        ("fp8", False),
        ("auto", CompileConfig()),
        ("int8", True),
        ("int8", False),
    ):
        with Runtime.from_pretrained(
            tiny_folder, compile=compile_, kv_cache_dtype=kv_cache_dtype, **settings
        ) as runtime:
            found.append((tokens(runtime), logprobs(runtime)))
            compiled.append(runtime.stats()["compile"])
    for first in (0, 3):
        assert found[first][0] == found[first + 1][0]
        assert torch.equal(found[first][1], found[first + 1][1])
        assert not torch.equal(found[first][1], found[2][1])
    assert compiled[2]["compiled"] == compiled[3]["compiled"] == 0, (
        "what lies between the calls of attention is the same"
    )


def with_scales(folder, target, scales):
    """The checkpoint with further tensors."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | scales, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_scales_of_a_checkpoint_are_what_stored_numbers_are_multiplied_by(tiny_folder, tmp_path):
    layers = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    powers = with_scales(
        tiny_folder,
        tmp_path / "powers",
        {f"{name}.k_scale": torch.tensor([0.5]) for name in layers}
        | {f"{name}.v_scale": torch.tensor([2.0]) for name in layers},
    )
    lost = with_scales(
        tiny_folder, tmp_path / "lost", {f"{name}.v_scale": torch.tensor([1e9]) for name in layers}
    )
    found = []
    for folder in (tiny_folder, powers, lost):
        with Runtime.from_pretrained(folder, **WIDE) as runtime:
            found.append(logprobs(runtime))
    assert (found[0] - found[1]).abs().mean() < 0.05, "a power of two moves no number but the least"
    assert (found[0] - found[2]).abs().mean() > 0.2, "values divided by so much are all zeros"
    heads = with_scales(tiny_folder, tmp_path / "heads", {f"{layers[0]}.k_scale": torch.tensor([0.5, 1.0])})
    with pytest.raises(UnsupportedError, match=r"layers\.0\.k_scale differs from head to head"):
        Runtime.from_pretrained(heads, **WIDE)
    Runtime.from_pretrained(heads, **WIDE | {"kv_cache_dtype": "auto"}).close()


def test_scales_that_a_checkpoint_lacks_are_one_and_said_to_be(tiny_folder, tmp_path, said):
    layers = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    some = {f"{layers[0]}.{name}_scale": torch.tensor([1.0]) for name in "kv"}
    every = some | {f"{layers[1]}.{name}_scale": torch.tensor([1.0]) for name in "kv"}
    found, warned = [], []
    for number, scales in enumerate(({}, some, every)):
        with Runtime.from_pretrained(with_scales(tiny_folder, tmp_path / str(number), scales), **WIDE) as one:
            found.append(logprobs(one))
        warned.append([line for line in said() if "no scales of keys and values" in line])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert [len(lines) for lines in warned] == [1, 2, 2]
    assert "(4 of 4 are missing, the first layers.0.k_scale)" in warned[0][0]
    assert "(2 of 4 are missing, the first layers.1.k_scale)" in warned[1][1]
    with Runtime.from_pretrained(tiny_folder, **WIDE | {"kv_cache_dtype": "auto"}):
        assert len([line for line in said() if "no scales of keys and values" in line]) == 2


def test_each_layer_has_its_own_scales_in_what_it_writes_and_reads():
    calls = []

    class Backend:
        rotating_decode = None

        def write_kv_cache(self, *arguments):
            calls.append(arguments[-2:])

        def paged_attention(self, *arguments):
            calls.append(arguments[-2:])

    class Batch:
        slot_mappings = block_tables = (None,)
        seq_lens = query_start_loc = max_query_len = None

    scales = [(0.5, 2.0), (0.25, 4.0)]
    attend = PagedAttention(Backend(), [(None, None)] * 2, [AttentionSpec(scale=1.0)] * 2, None, scales)
    attend.begin(Batch())
    for layer in (1, 0):
        attend(layer, None, None, None, None)
    assert calls == [scales[1]] * 2 + [scales[0]] * 2


def test_a_cache_of_given_bytes_holds_more_tokens(tiny_folder, monkeypatch):
    monkeypatch.setattr(memory, "CPU_CACHE_BYTES", 1 << 20)
    held = {}
    for kv_cache_dtype in ("auto", "fp8"):
        settings = {"compile": False, "dtype": "float32", "kv_cache_dtype": kv_cache_dtype}
        with Runtime.from_pretrained(tiny_folder, **settings) as runtime:
            held[kv_cache_dtype] = runtime.stats()["blocks"]["total"] + 1
            resolved = runtime.stats()["resolved"]
            assert resolved["kv_cache_dtype"] == ("float8_e4m3fn" if kv_cache_dtype == "fp8" else "float32")
    assert held["fp8"] == 4 * held["auto"]


def test_what_identifies_answers_knows_the_dtype_of_the_cache_and_its_scales(tiny_folder, tmp_path):
    """Blocks are shared within a runtime, which has one dtype; whoever compares answers has this to go by."""
    scales = {"model.layers.0.self_attn.k_scale": torch.tensor([0.5])}
    scaled = with_scales(tiny_folder, tmp_path / "scaled", scales)
    found = []
    for folder, kv_cache_dtype in (
        (tiny_folder, "auto"),
        (tiny_folder, "fp8"),
        (scaled, "fp8"),
        (scaled, "fp8"),
    ):
        with Runtime.from_pretrained(folder, **WIDE | {"kv_cache_dtype": kv_cache_dtype}) as runtime:
            found.append(system_fingerprint(runtime._loaded))
    assert len(set(found[:3])) == 3
    assert found[2] == found[3]


def test_requests_of_another_salt_get_no_blocks_in_fp8(tiny_folder):
    with Runtime.from_pretrained(tiny_folder, **WIDE, block_size=4) as runtime:
        for salt, hits in (("a", 0), ("b", 0), ("a", 24)):
            before = runtime.stats()["prefix_cache"]["hit_tokens"]
            runtime.generate([prompt(27, 3)], GREEDY, cache_salt=salt)
            assert runtime.stats()["prefix_cache"]["hit_tokens"] - before == hits


@pytest.mark.parametrize("given", ["fp8_e5m2", "float8", 8, None, True])
def test_a_dtype_that_no_cache_has_is_refused_by_name(tiny_folder, given):
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is .*; wanted auto or fp8 or int8"):
        Runtime.from_pretrained(tiny_folder, kv_cache_dtype=given)


def test_flash_attention_is_refused_by_name(tiny_folder):
    with pytest.raises(UnsupportedError, match="flash_attn"):
        Runtime.from_pretrained(tiny_folder, kv_cache_dtype="fp8", attention="flash_attn", compile=False)


def test_slots_of_the_host_hold_the_bytes_of_blocks():
    caches = [tuple(torch.randn(6, 4, 2, 16).to(torch.float8_e4m3fn) for _ in range(2)) for _ in range(3)]
    before = [[cache.float().clone() for cache in pair] for pair in caches]
    blocks = HostBlocks(caches, 4)
    assert blocks.slot_bytes == 3 * 2 * 4 * 2 * 16

    class Copies:
        swap_out, swap_in = ((1, 0), (5, 3)), ((3, 2), (0, 4))

    blocks.copy(Copies())
    for pair, old in zip(caches, before, strict=True):
        for cache, numbers in zip(pair, old, strict=True):
            assert torch.equal(cache[2].float(), numbers[5])
            assert torch.equal(cache[4].float(), numbers[1])


def test_sizes_are_told_before_anything_is_loaded(tiny_folder, capsys):
    from lamina.cli import app

    facts = {}
    for kv_cache_dtype in ("auto", "fp8"):
        arguments = ["info", str(tiny_folder), "--json", "--dtype", "float32"]
        with pytest.raises(SystemExit):
            app([*arguments, "--kv-cache-dtype", kv_cache_dtype])
        facts[kv_cache_dtype] = json.loads(capsys.readouterr().out)
    assert facts["fp8"]["cache_dtype"] == "float8_e4m3fn"
    assert facts["fp8"]["cache_kib_per_token"] <= 0.13 < 0.5 <= facts["auto"]["cache_kib_per_token"]
