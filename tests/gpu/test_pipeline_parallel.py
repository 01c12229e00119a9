"""A model over two stages with a GPU each, which NCCL joins: the tokens of one GPU, captured or not."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lamina import CompileConfig, Draft, EngineDeadError, Runtime, SamplingParams

from ..families import FAMILIES
from .test_tensor_parallel import GREEDY, NAMES, PROMPTS, SEEDED, SETTINGS, check_by_oracle, tokens_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lambda name: FAMILIES[name].save(tmp_path_factory.mktemp(name))


@pytest.mark.parametrize("name", NAMES)
def test_two_stages_give_the_tokens_of_one_gpu(
    name: str, folder_of: Callable[[str], Path], compile_cache: Path
) -> None:
    folder, own = folder_of(name), {"cache_dir": compile_cache}
    seeded = tokens_of(folder, SEEDED, **own)
    own |= {"pipeline_parallel": 2, "require_warm": True}  # by what one process has compiled
    check_by_oracle(folder, name, tokens_of(folder, GREEDY, **own))
    assert tokens_of(folder, SEEDED, **own) == seeded


def test_bfloat16_answers_are_the_same_captured_or_not_and_from_start_to_start(
    folder_of: Callable[[str], Path], compile_cache: Path
) -> None:
    folder = folder_of("llama-chunks")
    settings: dict[str, Any] = {"cache_dir": compile_cache, "dtype": "bfloat16", "pipeline_parallel": 2}
    first = tokens_of(folder, SEEDED, **settings)
    assert tokens_of(folder, SEEDED, **settings) == first
    assert tokens_of(folder, SEEDED, **settings, compile=CompileConfig(cuda_graphs="off")) == first


def test_drafts_over_two_stages_give_the_tokens_of_one_gpu(
    folder_of: Callable[[str], Path], compile_cache: Path
) -> None:
    """A twin of the model drafts what the model draws, but for near-ties."""
    folder, own = folder_of("llama-chunks"), {"cache_dir": compile_cache}
    settings: dict[str, Any] = {**SETTINGS, **own, "speculative": Draft(model=folder, k=3)}
    with Runtime.from_pretrained(folder, **settings, pipeline_parallel=2) as runtime:
        answers = runtime.generate([list(prompt) for prompt in PROMPTS], GREEDY)
        counts = runtime.stats()["speculation"]
    check_by_oracle(folder, "llama-chunks", [answer.outputs[0].token_ids for answer in answers])
    assert counts["accepted_tokens"] > counts["draft_tokens"] // 2 > 10


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_stage_ends_every_request(
    rank: int, folder_of: Callable[[str], Path], compile_cache: Path
) -> None:
    many = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, detokenize=False)
    settings: dict[str, Any] = {**SETTINGS, "cache_dir": compile_cache, "pipeline_parallel": 2}
    with Runtime.from_pretrained(folder_of("llama-chunks"), **settings) as runtime:
        executor: Any = runtime._loaded.executor  # type: ignore[union-attr]
        stream = runtime.stream(PROMPTS[0], many)
        next(stream)
        os.kill(executor.pids[rank], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"rank {rank}: its process \d+ was ended by SIGKILL"):
            for _ in stream:
                pass
