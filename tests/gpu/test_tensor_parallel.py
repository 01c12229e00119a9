"""A model over workers on GPUs: ranks that are threads of one GPU, and processes with a GPU each."""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lamina import CompileConfig, EngineDeadError, Runtime, SamplingParams
from lamina.custom_ops import add_rms_norm, all_reduce, all_reduce_add_rms_norm
from lamina.custom_ops._shared import registry
from lamina.custom_ops.all_reduce.cuda_group import CudaGroup, sum_by_shares
from lamina.custom_ops.all_reduce.group import Group, current_group, set_group, sum_in_rank_order
from lamina.runtime.worker.input_batch import MAX_BANNED, NO_ID
from lamina.runtime.worker.sampler import SamplingRows, sample
from lamina.runtime.worker.vocabulary_part import VocabularyPart

from ..families import FAMILIES, oracle, oracle_logits
from ..ranks import as_processes
from .one_gpu_ranks import as_threads_of_one_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

PROMPTS = [[(37 * i + 11 * n) % 317 + 3 for i in range(length)] for n, length in enumerate((1, 4, 19, 40))]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
SEEDED = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True, detokenize=False)
NEAR_TIE = 1e-3
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_model_len": 128,
    "num_kv_blocks": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
NAMES = ["llama-chunks", "gemma3"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model of a family, by its name."""
    return lambda name: FAMILIES[name].save(tmp_path_factory.mktemp(name))


def tokens_of(folder: Path, params: SamplingParams, **settings: Any) -> list[list[int]]:
    with Runtime.from_pretrained(folder, **SETTINGS | settings) as runtime:
        answers = runtime.generate([list(prompt) for prompt in PROMPTS], params)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def check_by_oracle(folder: Path, name: str, answers: Sequence[Sequence[int]]) -> None:
    """Every token is the best of transformers' on the CPU, or nearly as good."""
    model = oracle(folder, FAMILIES[name].architecture)
    for prompt, got in zip(PROMPTS, answers, strict=True):
        logits = oracle_logits(model, prompt + list(got))[len(prompt) - 1 : -1]
        for place, token in enumerate(got):
            lead = float(logits[place].max() - logits[place, token])
            assert lead < NEAR_TIE, f"token {place} after {prompt} is {lead:.1e} behind"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_of_one_gpu_give_the_tokens_of_one(
    name: str, ranks: int, folder_of: Callable[[str], Path], compile_cache: Path
) -> None:
    """Each has a plan of its own in a thread; a sum is one launch of all ranks, which no graph can hold."""
    folder = folder_of(name)
    own: dict[str, Any] = {"cache_dir": compile_cache, "compile": CompileConfig(cuda_graphs="off")}

    def work(group: Group) -> list[list[list[int]]]:
        settings = {**own, "tensor_parallel": ranks}
        return [tokens_of(folder, params, **settings) for params in (GREEDY, SEEDED)]

    first, *others = as_threads_of_one_gpu(ranks, work)
    assert all(other == first for other in others)
    check_by_oracle(folder, name, first[0])
    assert first[1] == tokens_of(folder, SEEDED, **own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy_ids_out_of_parts_are_those_of_whole_rows(dtype: torch.dtype) -> None:
    """Of few different logits, so that many are largest; with banned ids and rows that are broken."""
    vocab, num_valid_ids, own_ids, num = 128_256, 128_000, 64_128, 64
    generator = torch.Generator("cuda").manual_seed(5)
    logits = torch.randint(-40, 40, (num, vocab), device="cuda", generator=generator).to(dtype)
    logits[7, 90_000], logits[8, 3] = float("nan"), float("inf")
    banned = torch.full((num, MAX_BANNED), NO_ID, dtype=torch.int32, device="cuda")
    banned[:, :3] = logits[:, :num_valid_ids].float().topk(3).indices.to(torch.int32)
    rows = SamplingRows(
        temperature=torch.zeros(num, device="cuda"),
        top_k=torch.zeros(num, dtype=torch.int32, device="cuda"),
        top_p=torch.ones(num, device="cuda"),
        min_p=torch.zeros(num, device="cuda"),
        seeds=torch.zeros(num, dtype=torch.int64, device="cuda"),
        positions=torch.zeros(num, dtype=torch.int64, device="cuda"),
        banned=banned,
        num_valid_ids=num_valid_ids,
    )
    wanted = sample(logits, rows).tolist()

    def choose(group: Group) -> list[int]:
        own = logits[:, group.rank * own_ids : (group.rank + 1) * own_ids]
        part = VocabularyPart(
            lambda hidden: own.clone(), group, num_own_ids=own_ids, num_valid_ids=num_valid_ids
        )
        out = torch.full((num,), -7, dtype=torch.int32, device="cuda")
        part.choose(out, banned, out)
        return out.tolist()

    assert as_threads_of_one_gpu(2, choose) == [wanted] * 2
    assert wanted[7] == wanted[8] == -1


def test_a_worker_in_a_process_of_its_own_gives_the_tokens_of_one(
    folder_of: Callable[[str], Path], compile_cache: Path
) -> None:
    folder, own = folder_of("llama-chunks"), {"cache_dir": compile_cache}
    for params in (GREEDY, SEEDED):
        wanted = tokens_of(folder, params, **own)
        assert tokens_of(folder, params, **own, executor="multiproc") == wanted


@two_gpus
@pytest.mark.parametrize("name", NAMES)
def test_two_gpus_give_the_tokens_of_one(
    name: str, folder_of: Callable[[str], Path], compile_cache: Path
) -> None:
    folder, own = folder_of(name), {"cache_dir": compile_cache}
    check_by_oracle(folder, name, tokens_of(folder, GREEDY, **own, tensor_parallel=2))
    seeded = tokens_of(folder, SEEDED, **own, tensor_parallel=2)
    assert seeded == tokens_of(folder, SEEDED, **own)


@two_gpus
def test_bfloat16_answers_are_the_same_captured_or_not_and_from_start_to_start(
    folder_of: Callable[[str], Path], compile_cache: Path
) -> None:
    folder = folder_of("llama-chunks")
    settings: dict[str, Any] = {"cache_dir": compile_cache, "dtype": "bfloat16", "tensor_parallel": 2}
    settings |= {"num_kv_blocks": None, "memory_fraction": 0.5}  # as much as both have room for
    first = tokens_of(folder, SEEDED, **settings)
    assert tokens_of(folder, SEEDED, **settings) == first
    assert tokens_of(folder, SEEDED, **settings, compile=CompileConfig(cuda_graphs="off")) == first


@two_gpus
def test_greedy_steps_that_are_captured_without_all_logits_come_to_the_same(
    folder_of: Callable[[str], Path], compile_cache: Path
) -> None:
    """Log-probabilities have every step gather all logits."""
    prompts = [[(31 * i + 7 * n) % 317 + 3 for i in range(1 + n)] for n in range(16)]
    settings: dict[str, Any] = {**SETTINGS, "dtype": "bfloat16", "max_num_seqs": 16, "tensor_parallel": 2}
    with Runtime.from_pretrained(folder_of("llama-chunks"), cache_dir=compile_cache, **settings) as runtime:
        found = []
        for logprobs in (None, 0):
            params = replace(GREEDY, logprobs=logprobs)
            answers = runtime.generate(prompts, params)
            found.append([list(answer.outputs[0].token_ids) for answer in answers])
    assert found[0] == found[1]


@two_gpus
def test_a_killed_worker_ends_every_request_and_the_next_start_works(
    folder_of: Callable[[str], Path], compile_cache: Path
) -> None:
    folder = folder_of("llama-chunks")
    many = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, detokenize=False)
    settings: dict[str, Any] = {**SETTINGS, "cache_dir": compile_cache, "tensor_parallel": 2}
    with Runtime.from_pretrained(folder, **settings) as runtime:
        executor: Any = runtime._loaded.executor  # type: ignore[union-attr]
        stream = runtime.stream(PROMPTS[0], many)
        next(stream)
        os.kill(executor.pids[1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"rank 1: its process \d+ was ended by SIGKILL"):
            for _ in stream:
                pass
    assert all(len(answer) == 32 for answer in tokens_of(folder, GREEDY, **settings))


@two_gpus
def test_every_way_to_sum_has_the_same_bits_on_both_gpus(tmp_path: Path) -> None:
    first, second = as_processes(2, _sum_every_way, tmp_path)
    assert first == second
    assert first > 0


def _sum_every_way(group: Group) -> int:
    """How many sums were those in the order of ranks, by every provider that can; all of them must be."""
    torch.cuda.set_device(group.rank)
    device, count = torch.device("cuda", group.rank), 0
    set_group(own := CudaGroup(group, device))
    assert current_group().peers is not None, "GPUs of one machine here reach each other"
    for num_bytes in (16, 8 << 10, 64 << 10, 72 << 10, 1 << 20, 4 << 20, 16 << 20):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            xs = [_drawn(rank, num_bytes // dtype.itemsize, dtype, device) for rank in range(2)]
            wanted = sum_in_rank_order(xs)
            names = ("cuda", "group", "one_shot", "two_shot")
            for name in names if num_bytes <= 4 << 20 else names[:2]:
                call = registry.select("all_reduce", device=device, dtype=dtype, provider=name).call
                assert torch.equal(call(xs[group.rank], 2), wanted), (name, num_bytes, dtype)
                count += 1
            assert torch.equal(sum_by_shares(xs[group.rank], 2, own._nccl), wanted), "as of more than two"
    _replay_in_a_graph(group.rank, device)
    _replay_sums_that_differ(group.rank, device)
    own.close()
    return count


def _drawn(seed: int, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The same on every GPU: drawn on the host."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=generator) * 10.0 ** (seed % 4)).to(device, dtype)


def _replay_in_a_graph(rank: int, device: torch.device) -> None:
    """Sums and norms that follow each other with no word between the hosts; each adds what the last gave."""
    x, residual = (_drawn(seed, 16 * 4096, torch.bfloat16, device).view(16, 4096) for seed in (rank, 7))
    weight, own = _drawn(8, 4096, torch.bfloat16, device), torch.full_like(x, rank + 1)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        state = residual
        for _ in range(31):
            out, state = all_reduce_add_rms_norm(own, state, weight, 1e-5, 2)
            state = state - all_reduce(own, 2)
        return out, state

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads of its own
        found = run()
    for step in range(1, 400):
        own.fill_(rank + step)
        graph.replay()
        if step % 57 == 0:
            assert all(torch.equal(*pair) for pair in zip(found, run(), strict=True)), step


def _replay_sums_that_differ(rank: int, device: torch.device) -> None:
    """No call finds what another one left: small ones that are sent in packets, and larger ones, 10^5 in all.

    An odd number of them is in the graph, so that buffers take other turns in each replay.
    """
    weight, wrong = _drawn(9, 4096, torch.bfloat16, device), torch.zeros((), dtype=torch.int64, device=device)
    calls: list[tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]] = []
    for number in range(51):
        rows = (1, 1, 8, 2, 9, 1, 5, 16)[number % 8]
        xs = [
            _drawn(2 * number + of, rows * 4096, torch.bfloat16, device).view(rows, 4096) for of in range(2)
        ]
        total = sum_in_rank_order(xs)
        wanted = add_rms_norm(total, xs[0], weight, 1e-5) if number % 3 else (total,)
        calls.append((xs[rank], xs[0], wanted))

    def run() -> None:
        for x, residual, wanted in calls:
            if len(wanted) == 1:
                found: tuple[torch.Tensor, ...] = (all_reduce(x, 2),)
            else:
                found = all_reduce_add_rms_norm(x, residual, weight, 1e-5, 2)
            for out, want in zip(found, wanted, strict=True):
                wrong.add_((out != want).any())

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    for _ in range(2000):
        graph.replay()
    assert int(wrong) == 0
