"""Models and heads that draft: the answers are those of the model alone, and a twin of it is always right."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.heads import RandomHead

from lamina import Runtime, SamplingParams
from lamina.runtime.scheduler.drafting import Drafting
from lamina.runtime.speculation.config import Draft, Eagle

PROMPTS = [[5, 6, 7, 8], [9] * 20, [11, 12] * 30, [3], [*range(40, 80)]]
PLAIN = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(
    max_tokens=30, temperature=0.9, top_k=50, top_p=0.9, min_p=0.01, seed=7, ignore_eos=True
)
LAYERS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}  # TINY has two

Answers = list[list[int]]
Run = Callable[..., tuple[Answers, Drafting]]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of heads with random weights, by their kind."""
    made = {
        "eagle-1": RandomHead(is_third=False),
        "eagle-3": RandomHead(is_third=True, changes=LAYERS),
        "eagle-3 of few ids": RandomHead(is_third=True, changes=LAYERS, draft_vocab_size=50),
        "eagle-3 without embedding": RandomHead(is_third=True, changes=LAYERS, has_embedding=False),
    }
    return {name: head.save(tmp_path_factory.mktemp("head")) for name, head in made.items()}


@pytest.fixture(scope="module")
def run(tiny_folder: Path, compile_cache: Path) -> Run:
    """run(drafter, params, …) -> the answers to PROMPTS and what became of drafts."""

    def generate(
        speculative: Any, params: SamplingParams, prompts: Any = PROMPTS, **settings: Any
    ) -> tuple[Answers, Drafting]:
        settings = {"compile": False, "dtype": "float64", "max_num_seqs": 8, "num_kv_blocks": 64} | settings
        with Runtime.from_pretrained(
            tiny_folder, speculative=speculative, cache_dir=compile_cache, **settings
        ) as runtime:
            answers = runtime.generate(prompts, params)
            drafting = runtime._loaded.core.scheduler.drafting  # type: ignore[union-attr]
            return [list(one.outputs[0].token_ids) for one in answers], drafting

    return generate


@pytest.fixture(scope="module")
def alone(run: Run) -> Callable[..., Answers]:
    """alone(params, …) -> the answers without a drafter."""
    made: dict[str, Answers] = {}

    def answers(params: SamplingParams, **settings: Any) -> Answers:
        key = repr((params, settings))
        if key not in made:
            made[key] = run(None, params, **settings)[0]
        return made[key]

    return answers


@pytest.mark.parametrize("params", [PLAIN, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_a_twin_of_the_model_drafts_what_the_model_draws(
    k: int, params: SamplingParams, tiny_folder: Path, run: Run, alone: Callable[..., Answers]
) -> None:
    answers, drafting = run(Draft(model=tiny_folder, k=k), params)
    assert answers == alone(params)
    assert drafting.num_accepted == drafting.num_drafted > 0


@pytest.mark.parametrize("params", [PLAIN, DRAWN], ids=["greedy", "drawn"])
def test_another_model_as_a_drafter_changes_no_answer(
    params: SamplingParams,
    make_tiny_folder: Callable[..., Path],
    run: Run,
    alone: Callable[..., Answers],
) -> None:
    other = make_tiny_folder(seed=5, num_hidden_layers=1, num_key_value_heads=4, head_dim=8)
    answers, drafting = run(Draft(model=other, k=2), params)
    assert answers == alone(params)
    assert drafting.num_drafted > 0


@pytest.mark.parametrize("params", [PLAIN, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3", "eagle-3 of few ids", "eagle-3 without embedding"])
def test_a_head_changes_no_answer(
    kind: str,
    params: SamplingParams,
    heads: dict[str, Path],
    run: Run,
    alone: Callable[..., Answers],
) -> None:
    answers, drafting = run(Eagle(model=heads[kind], k=3), params)
    assert answers == alone(params)
    assert drafting.num_drafted > 0


CROWDED = {
    "few blocks": {"num_kv_blocks": 14, "max_num_seqs": 4},
    "swap": {"num_kv_blocks": 14, "max_num_seqs": 4, "swap_bytes": 1 << 24},
    "small blocks": {"block_size": 2, "num_kv_blocks": 300},
    "prompts in parts": {"prefill_chunk": 7},
    "few tokens a step": {"max_num_batched_tokens": 16},
    "no prefix cache": {"prefix_cache": False},
}


@pytest.mark.parametrize("crowded", CROWDED)
def test_a_twin_stays_right_through_whatever_becomes_of_blocks(
    crowded: str, tiny_folder: Path, run: Run, alone: Callable[..., Answers]
) -> None:
    answers, drafting = run(Draft(model=tiny_folder, k=3), DRAWN, **CROWDED[crowded])
    assert answers == alone(DRAWN)
    assert drafting.num_accepted > 0
    if "few blocks" not in crowded and crowded != "swap":  # blocks ahead are not had where others need them
        assert drafting.num_accepted == drafting.num_drafted


@pytest.mark.parametrize("crowded", CROWDED)
def test_a_head_changes_no_answer_whatever_becomes_of_blocks(
    crowded: str, heads: dict[str, Path], run: Run, alone: Callable[..., Answers]
) -> None:
    answers, _ = run(Eagle(model=heads["eagle-3 of few ids"], k=2), DRAWN, **CROWDED[crowded])
    assert answers == alone(DRAWN)


@pytest.mark.parametrize("kind", ["draft", "eagle-3"])
def test_rows_amid_a_prompt_draft_nothing_beside_others_by_kernels_that_check_lengths(
    kind: str, tiny_folder: Path, heads: dict[str, Path], run: Run, alone: Callable[..., Answers]
) -> None:
    narrow = {"dtype": "float32", "prefill_chunk": 7}
    drafter = Draft(model=tiny_folder, k=3) if kind == "draft" else Eagle(model=heads[kind], k=3)
    assert run(drafter, PLAIN, **narrow)[0] == alone(PLAIN, **narrow)


def test_a_prefix_that_is_a_hit_brings_the_drafters_keys_along(tiny_folder: Path, run: Run) -> None:
    shared = [*range(40, 140)]
    prompts = [[*shared, 7], [*shared, 8, 9], [*shared, 7]]
    with Runtime.from_pretrained(
        tiny_folder,
        compile=False,
        dtype="float64",
        num_kv_blocks=64,
        speculative=Draft(model=tiny_folder, k=3),
    ) as runtime:
        for prompt in prompts:
            runtime.generate([prompt], DRAWN)
        counts, hits = runtime.stats()["speculation"], runtime.stats()["prefix_cache"]
    assert counts["accepted_tokens"] == counts["draft_tokens"] > 0
    assert hits["hit_tokens"] >= 2 * 96


PROCESSED = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    "min_tokens": {"min_tokens": 9, "ignore_eos": False},
    "min_p": {"min_p": 0.3},
    "bias": {"logit_bias": {5: 30.0}},
    "logprobs": {"logprobs": 2},
}


@pytest.mark.parametrize("processed", PROCESSED)
def test_what_samples_are_processed_by_holds_at_every_position(
    processed: str, tiny_folder: Path, run: Run, alone: Callable[..., Answers]
) -> None:
    settings: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 24, "ignore_eos": True}
    params = SamplingParams(**settings | PROCESSED[processed])
    assert run(Draft(model=tiny_folder, k=3), params)[0] == alone(params)


def test_an_answer_ends_at_its_last_position_exactly(
    tiny_folder: Path, run: Run, alone: Callable[..., Answers]
) -> None:
    for max_tokens in (1, 2, 3, 4, 5, 64):
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        answers, _ = run(Draft(model=tiny_folder, k=7), params, max_model_len=66)
        assert answers == alone(params, max_model_len=66)
        limits = [min(max_tokens, 66 - len(prompt)) for prompt in PROMPTS]
        assert [len(answer) for answer in answers] == limits
