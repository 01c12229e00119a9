"""Sleep on a GPU: memory is given back, graphs are captured again, weights are replaced under them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from lamina import CompileConfig, Runtime, SamplingParams

from .device_memory import bytes_of_this_process as used

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [[5, 6, 7], [*range(40, 70)], [7] * 33]
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "head_dim": 128,
}


def tokens(runtime: Runtime) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in runtime.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("graphs", ["auto", "lazy"])
@pytest.mark.parametrize("quantization", [None, "w4a16"])
def test_memory_comes_back_and_tokens_are_the_same(
    make_tiny_folder: Callable[..., Path], graphs: Literal["auto", "lazy"], quantization: str | None
) -> None:
    settings: dict[str, Any] = {
        "compile": CompileConfig(cuda_graphs=graphs),
        "device": "cuda",
        "num_kv_blocks": 4096,
    }
    with Runtime.from_pretrained(
        make_tiny_folder(**SIZES), dtype="bfloat16", quantization=quantization, **settings
    ) as runtime:
        before, memory = tokens(runtime), runtime._loaded.runner._memory
        for level in (1, 2, 1, 2):
            full = used()
            runtime.sleep(level)
            assert full - used() >= 0.95 * memory.num_bytes
            runtime.wake()
            assert tokens(runtime) == before
        settled = used()
        for level in (1, 2) * 5:
            runtime.sleep(level)
            runtime.wake()
        assert used() - settled < 32 << 20


def test_memory_comes_back_that_torch_had_kept_before(make_tiny_folder: Callable[..., Path]) -> None:
    kept = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    del kept
    settings: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda", "num_kv_blocks": 4096}
    with Runtime.from_pretrained(make_tiny_folder(**SIZES), **settings) as runtime:
        full = used()
        runtime.sleep()
        assert full - used() >= 0.95 * runtime._loaded.runner._memory.num_bytes


def test_captures_read_the_weights_that_were_given(make_tiny_folder: Callable[..., Path]) -> None:
    first, second = (make_tiny_folder(seed=seed, **SIZES) for seed in (0, 1))
    settings: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda"}
    with Runtime.from_pretrained(second, **settings) as runtime:
        right = tokens(runtime)
    given = load_file(Path(second) / "model.safetensors", device="cuda")
    with Runtime.from_pretrained(first, **settings) as runtime:
        before, replays = tokens(runtime), runtime.stats()["cuda_graphs"]["replays"]
        runtime.update_weights(given)
        assert tokens(runtime) == right
        assert runtime.stats()["cuda_graphs"]["replays"] > replays
        runtime.update_weights(first)
        assert tokens(runtime) == before
