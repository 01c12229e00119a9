"""The whole runtime on a GPU: the same tokens as transformers, captured or not, alone or batched."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lamina import CompileConfig, Runtime, SamplingParams
from lamina.runtime.startup import engine_builder
from lamina.runtime.startup.memory import available_bytes

from .device_memory import bytes_of_this_process

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROMPTS = [[3 + (7 * row + 3 * column) % 300 for column in range(4 + 5 * row)] for row in range(11)]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, seed=11, max_tokens=40, ignore_eos=True)
NEAR_TIE = 1e-4


@pytest.fixture(scope="module")
def open_runtime(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Runtime]:
    """open_runtime(**settings): float32 on the GPU, compiled once for the module."""
    cache = tmp_path_factory.mktemp("cache")

    def make(cuda_graphs: Any = "auto", **settings: Any) -> Runtime:
        chosen: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 64}
        chosen |= {"compile": CompileConfig(cuda_graphs=cuda_graphs)}
        return Runtime.from_pretrained(tiny_folder, device="cuda", cache_dir=cache, **chosen | settings)

    return make


@pytest.fixture(scope="module")
def captured(open_runtime: Callable[..., Runtime]) -> Iterator[Runtime]:
    with open_runtime() as runtime:
        yield runtime


def _tokens(runtime: Runtime, prompts: list[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in runtime.generate(prompts, params)]


@pytest.fixture(scope="module")
def alone(captured: Runtime) -> list[tuple[int, ...]]:
    return [_tokens(captured, [prompt], GREEDY)[0] for prompt in PROMPTS]


def test_greedy_tokens_are_those_of_transformers_on_the_gpu(
    tiny_folder: Path, tiny_reference: Callable[[Path], Any], alone: list[tuple[int, ...]]
) -> None:
    model = tiny_reference(tiny_folder).to("cuda")
    try:
        for prompt, got in zip(PROMPTS, alone, strict=True):
            ids = list(prompt)
            for place, token in enumerate(got):
                with torch.inference_mode():
                    best = model(torch.tensor([ids], device="cuda")).logits[0, -1].topk(2)
                if token != int(best.indices[0]):
                    lead = float(best.values[0] - best.values[1])
                    assert lead < NEAR_TIE, f"token {place} after {prompt}: the oracle's leads by {lead:.2e}"
                ids.append(token)
    finally:
        model.to("cpu")


@pytest.mark.parametrize("count", [2, 3, 5, 7, 9, 11])
def test_a_batch_between_captured_sizes_gives_the_tokens_of_each_alone(
    captured: Runtime, alone: list[tuple[int, ...]], count: int
) -> None:
    assert _tokens(captured, PROMPTS[:count], GREEDY) == alone[:count]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_captured_and_not_captured_steps_give_the_same_tokens(
    open_runtime: Callable[..., Runtime], captured: Runtime, params: SamplingParams
) -> None:
    with_graphs = _tokens(captured, PROMPTS, params)
    assert captured.stats()["cuda_graphs"]["replays"] > 0
    with open_runtime(cuda_graphs="off") as plain:
        assert _tokens(plain, PROMPTS, params) == with_graphs
        assert plain.stats()["cuda_graphs"]["replays"] == 0


def sizes_of(runtime: Runtime) -> set[tuple[str, int]]:
    return {(kind, size) for kind, size in runtime.stats()["cuda_graphs"]["sizes"]}


def test_sizes_are_captured_between_steps_and_give_the_same_tokens(
    open_runtime: Callable[..., Runtime], alone: list[tuple[int, ...]]
) -> None:
    with open_runtime() as growing, open_runtime(cuda_graphs="on") as whole:
        first, every = sizes_of(growing), sizes_of(whole)
        assert first < every
        for count in (2, 3, 4, 11, 7):
            for params in (GREEDY, SEEDED):
                asked = PROMPTS[:count]
                assert _tokens(growing, asked, params) == _tokens(whole, asked, params)
        assert first < sizes_of(growing) <= every
        assert _tokens(growing, PROMPTS, GREEDY) == alone


def test_eager_and_compiled_give_the_same_tokens(
    open_runtime: Callable[..., Runtime], alone: list[tuple[int, ...]]
) -> None:
    with open_runtime(compile=False) as eager:
        assert _tokens(eager, PROMPTS, GREEDY) == alone


@pytest.mark.parametrize("attention", ["cuda", "triton", "reference"])
def test_every_attention_backend_gives_the_same_tokens(
    open_runtime: Callable[..., Runtime], alone: list[tuple[int, ...]], attention: str
) -> None:
    with open_runtime(attention=attention, cuda_graphs="off", block_size=16) as runtime:
        assert _tokens(runtime, PROMPTS[:6], GREEDY) == alone[:6]


def test_a_kv_cache_in_fp8_gives_the_tokens_of_each_alone_captured_or_not(
    open_runtime: Callable[..., Runtime],
) -> None:
    """In float32 by Triton; a small cache preempts requests, whose blocks are swapped out and in."""
    with open_runtime(kv_cache_dtype="fp8") as runtime:
        alone = [_tokens(runtime, [prompt], GREEDY)[0] for prompt in PROMPTS]
        assert runtime.stats()["resolved"]["attention"] == "triton"
        assert _tokens(runtime, PROMPTS, GREEDY) == alone
        assert runtime.stats()["cuda_graphs"]["replays"] > 0
    with open_runtime(
        kv_cache_dtype="fp8", cuda_graphs="off", num_kv_blocks=17, block_size=16, swap_bytes=1 << 26
    ) as small:
        assert _tokens(small, PROMPTS, GREEDY) == alone
        assert small.stats()["preemptions"] > 0


@pytest.mark.parametrize("block_size", [16, 64])
def test_cuda_kernels_over_fp8_give_the_same_tokens_captured_or_not(
    open_runtime: Callable[..., Runtime], block_size: int
) -> None:
    """Eight requests in bfloat16: a size that is captured, so that the same kernels run."""
    settings: dict[str, Any] = {"kv_cache_dtype": "fp8", "dtype": "bfloat16", "attention": "cuda"}
    tokens = []
    for cuda_graphs in ("auto", "off"):
        with open_runtime(cuda_graphs=cuda_graphs, block_size=block_size, **settings) as runtime:
            tokens.append(_tokens(runtime, PROMPTS[:8], GREEDY))
            assert (runtime.stats()["cuda_graphs"]["replays"] > 0) == (cuda_graphs == "auto")
    assert tokens[0] == tokens[1]


def test_blocks_that_move_and_batches_that_shrink_are_honoured_by_replays(
    open_runtime: Callable[..., Runtime], alone: list[tuple[int, ...]]
) -> None:
    """A cache so small that requests are preempted: tables change between two replays of one CUDA graph."""
    with open_runtime(num_kv_blocks=17, block_size=16) as runtime:
        assert _tokens(runtime, PROMPTS, GREEDY) == alone
        stats = runtime.stats()
        assert stats["preemptions"] > 0
        assert stats["cuda_graphs"]["padded_tokens"] > 0
        assert stats["blocks"]["free"] + stats["blocks"]["cached"] == stats["blocks"]["total"]


@pytest.mark.parametrize("depth", [1, 3])
def test_any_number_of_steps_in_flight_gives_the_same_tokens(
    open_runtime: Callable[..., Runtime],
    captured: Runtime,
    alone: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    depth: int,
) -> None:
    stopping = SamplingParams(
        temperature=0, max_tokens=40, stop_token_ids=list(alone[0][3:6]), ignore_eos=True
    )
    monkeypatch.setitem(engine_builder.DEPTHS, "cuda", depth)
    with open_runtime(num_kv_blocks=17, block_size=16) as runtime:
        for params in (GREEDY, SEEDED, stopping):
            assert _tokens(runtime, PROMPTS, params) == _tokens(captured, PROMPTS, params)
        stats = runtime.stats()
        assert stats["preemptions"] > 0
        assert stats["blocks"]["free"] + stats["blocks"]["cached"] == stats["blocks"]["total"]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_blocks_that_go_to_pinned_memory_and_back_give_the_same_tokens(
    open_runtime: Callable[..., Runtime], captured: Runtime, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """What a large cache gives, captured steps included; in between nearly every block has been elsewhere."""
    monkeypatch.setitem(engine_builder.DEPTHS, "cuda", depth)
    with open_runtime(num_kv_blocks=17, block_size=16, swap_bytes=64 * 16 * 512) as runtime:
        for params in (GREEDY, SEEDED):
            assert _tokens(runtime, PROMPTS, params) == _tokens(captured, PROMPTS, params)
        stats = runtime.stats()
        assert stats["preemptions"] > 0
        assert stats["cuda_graphs"]["replays"] > 0
        assert stats["swap"]["in"] > 0
        assert (stats["swap"]["total"], stats["swap"]["used"]) == (64, 0)
        assert stats["swap"]["host_bytes"] > 0
        assert stats["blocks"]["used"] == 0


def test_padding_rows_write_nothing_into_the_cache(open_runtime: Callable[..., Runtime]) -> None:
    with open_runtime(num_kv_blocks=9) as runtime:
        caches = (
            runtime._open.core._executor.model_runner._attention._caches
        )  # where a stray write would show
        for keys, values in caches:
            keys.fill_(7.0)
            values.fill_(7.0)
        _tokens(runtime, PROMPTS[:3], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        for keys, values in caches:
            assert bool((keys[0] == 7.0).all() and (values[0] == 7.0).all()), "the null block was written"
            assert bool((keys[-1] == 7.0).all()), "a block that no request owned was written"


def test_min_tokens_is_honoured_between_captured_steps(captured: Runtime) -> None:
    params = SamplingParams(temperature=1.0, seed=5, min_tokens=12, max_tokens=20)
    (output,) = captured.generate([PROMPTS[0]], params)
    assert len(output.outputs[0].token_ids) >= 12


def test_memory_comes_back_after_close(open_runtime: Callable[..., Runtime]) -> None:
    taken = []
    for _ in range(4):  # the first leaves what a process needs once: loaded kernels, workspaces
        with open_runtime() as runtime:
            _tokens(runtime, PROMPTS[:2], GREEDY)
        taken.append(bytes_of_this_process())
    assert taken[-1] - taken[0] < 32 << 20, taken


def test_what_torch_keeps_for_itself_is_available() -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    held = torch.empty(free * 8 // 10, dtype=torch.uint8, device="cuda")
    assert available_bytes(held.device) < free // 2
    device = held.device
    del held
    assert available_bytes(device) > free * 9 // 10
    torch.cuda.empty_cache()
