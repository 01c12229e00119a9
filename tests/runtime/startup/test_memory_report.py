"""The answer to "does it fit?" before weights are read, with settings that make it fit."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from lamina import ConfigError, Runtime, UnsupportedError
from lamina.cli import app
from lamina.cli.info import describe_fit
from lamina.models.quantization.model_schemes import ModelSchemes
from lamina.models.registry import find_model
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.startup import memory
from lamina.runtime.startup.memory_report import size

from .resolving import resolve_alone


@pytest.fixture
def fit(make_tiny_folder, monkeypatch):
    """fit(available, **settings) -> Sizing of TINY, 256 positions, 512 bytes of KV cache a token in fp32."""
    from lamina.models.config import read_model_config

    model = read_model_config(make_tiny_folder())

    def make(available, device="cpu", dtype=torch.float32, **settings):
        monkeypatch.setattr(memory, "available_bytes", lambda device: available)
        config = RuntimeConfig(model="tiny", max_num_seqs=1, **settings)
        return size(resolve_alone(config, model, dtype, torch.device(device)))

    make.weights = ModelSchemes(specs=find_model(model.architecture).parameters(model)).num_bytes(
        torch.float32
    )
    return make


def test_where_a_whole_context_fits_it_says_how_much(fit):
    sizing = fit(1 << 30)
    assert sizing.missing_bytes == 0
    assert sizing.sentence().startswith("this fits 256 tokens (0.0 GiB of KV cache), of which a request may")


def test_where_it_does_not_fit_the_missing_bytes_are_exact_and_each_remedy_works(fit):
    available = (fit.weights + 512 * 16 * 9) * 10 // 9 + 2  # 8 blocks of 16 tokens and the null block
    sizing = fit(available)
    assert sizing.capacity_tokens == 128
    assert sizing.missing_bytes == 128 * 512
    assert "this fits 128 tokens" in sizing.sentence()
    assert "for 256 you need 0.0 GiB more, or max_model_len=129" in sizing.sentence()
    assert fit(available, max_model_len=129).missing_bytes == 0
    assert "dtype='bfloat16'" in sizing.sentence()
    assert fit(available, dtype=torch.bfloat16).missing_bytes == 0
    assert "num_kv_blocks" not in sizing.sentence()


def test_where_only_the_caution_of_a_cpu_keeps_the_cache_small_more_blocks_are_a_remedy(fit, monkeypatch):
    monkeypatch.setattr(memory, "CPU_CACHE_BYTES", 512 * 16 * 9)
    sizing = fit(1 << 30)
    assert sizing.capacity_tokens == 128
    (blocks,) = re.findall(r"num_kv_blocks=(\d+)", sizing.sentence())
    assert fit(1 << 30, num_kv_blocks=int(blocks)).missing_bytes == 0
    assert fit(1 << 30, num_kv_blocks=int(blocks) - 1).missing_bytes > 0


def test_where_every_layer_has_a_window_it_says_what_a_request_keeps(fit, monkeypatch):
    assert "keeps" not in fit(1 << 30).sentence()
    windowed = memory.LayerGroup(window=40, layers=(0, 1))
    monkeypatch.setattr(memory, "layer_groups", lambda model: (windowed,))
    assert "GiB of KV cache), and a request keeps its last 40, of which" in fit(1 << 30).sentence()
    assert "keeps" not in fit(1 << 30, max_model_len=40).sentence()


def test_a_remedy_that_would_not_do_is_not_named(fit):
    sizing = fit((fit.weights + 512 * 16 * 2) * 10 // 9, dtype=torch.bfloat16, memory_fraction=0.5)
    assert sizing.missing_bytes > 0
    assert "bfloat16" not in sizing.sentence()


def test_on_a_gpu_a_larger_fraction_is_a_remedy(fit, monkeypatch):
    monkeypatch.setattr(memory, "GRAPH_BYTES", 0)
    available = 100 * (fit.weights + 512 * 16 * 9)
    sizing = fit(available, device="cuda", memory_fraction=0.0101)
    assert sizing.missing_bytes > 0
    (fraction,) = re.findall(r"memory_fraction=([\d.]+)", sizing.sentence())
    assert fit(available, device="cuda", memory_fraction=float(fraction)).missing_bytes == 0


def test_on_a_gpu_room_is_kept_for_what_penalties_need_to_know(fit):
    gpu = {"device": "cuda", "memory_fraction": 1.0}
    available = fit.weights + 512 * 64 * 4 + 256 * 4 + 256 * 4 // 2 + 320 * 4
    assert fit(available, **gpu).num_blocks == 4
    assert fit(available - 1, **gpu).num_blocks == 3
    assert fit(available).adjusting_bytes == 0, "a CPU gives memory as it is touched"


def test_a_gpu_swaps_to_an_eighth_of_the_free_host_at_most_and_a_cpu_only_when_asked(fit):
    gpu = fit(1 << 30, device="cuda")
    assert gpu.swap_bytes == gpu.num_blocks * 64 * 512, "no more than the cache holds"
    assert "GiB of KV cache, 0.0 GiB of the host to swap to)" in gpu.sentence()
    small = fit(8 << 16, device="cuda", num_kv_blocks=5)
    assert small.swap_bytes == 1 << 16
    assert fit(1 << 30).swap_bytes == 0
    assert "swap" not in fit(1 << 30).sentence()
    assert fit(1 << 30, swap_bytes=1 << 20).swap_bytes == 1 << 20
    assert fit(1 << 30, device="cuda", prefix_cache=False).swap_bytes == 0
    assert fit(1 << 30, device="cuda", swap_bytes=0).swap_bytes == 0


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"swap_bytes": -1}, "swap_bytes is -1; wanted an integer, at least 0"),
        ({"swap_bytes": 0.5}, "swap_bytes is 0.5; wanted an integer, at least 0"),
        ({"swap_bytes": 8191}, "swap_bytes is 8191; wanted 0 or at least 8192, for a block of every layer"),
        ({"swap_bytes": 1, "prefix_cache": False}, "swap_bytes is 1 and prefix_cache False; wanted"),
    ],
)
def test_swapping_that_cannot_be_is_refused(fit, settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        fit(1 << 30, **settings)


def test_layers_with_windows_do_not_swap_and_it_is_said(fit, monkeypatch, said):
    windowed = memory.LayerGroup(window=40, layers=(0, 1))
    monkeypatch.setattr(memory, "layer_groups", lambda model: (windowed,))
    assert fit(1 << 30, device="cuda").swap_bytes == 0
    assert any(line.startswith("swap_bytes: 0, since layers of this model see a window") for line in said())
    with pytest.raises(
        UnsupportedError, match="swap_bytes is 1048576, but layers of this model see a window"
    ):
        fit(1 << 30, swap_bytes=1 << 20)


def test_it_is_said_before_weights_are_read_and_loudly_where_it_was_asked_for(tiny_folder, said, monkeypatch):
    Runtime.from_pretrained(tiny_folder, compile=False, max_num_seqs=1).close()
    assert any(line.startswith("memory: this fits 256 tokens") for line in said())
    Runtime.from_pretrained(tiny_folder, compile=False, num_kv_blocks=3, max_model_len=100).close()
    assert any("this fits 32 tokens" in line and "for 100 you need" in line for line in said())


def test_info_tells_what_of_a_model_fits(tiny_folder):
    facts = describe_fit(RuntimeConfig(model=tiny_folder, device="cpu", max_model_len=100))
    assert (facts["missing_gib"], facts["cache_kib_per_token"]) == (0.0, 0.5)
    assert "this fits" in facts["fit"]
    shown = CliRunner().invoke(app, ["info", str(tiny_folder), "--json", "--device", "cpu"])
    assert json.loads(shown.stdout)["cache_tokens"] > 256
