"""Models and heads that draft: the answers are those of the model alone, and a twin of it is always right."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.heads import RandomHead

from lamina import Runtime, SamplingParams
from lamina.runtime.scheduler.drafting import Drafting
from lamina.runtime.speculation.config import Draft, Eagle
from lamina.runtime.startup import engine_builder

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


@pytest.mark.parametrize("kind", ["draft", "eagle-3"])
def test_a_prefix_that_is_a_hit_brings_the_drafters_keys_along(
    kind: str, tiny_folder: Path, heads: dict[str, Path]
) -> None:
    drafter = Draft(model=tiny_folder, k=3) if kind == "draft" else Eagle(model=heads[kind], k=3)
    shared = [*range(40, 140)]
    prompts = [[*shared, 7], [*shared, 8, 9], [*shared, 7]]
    with Runtime.from_pretrained(
        tiny_folder,
        compile=False,
        dtype="float64",
        num_kv_blocks=64,
        speculative=drafter,
    ) as runtime:
        for prompt in prompts:
            runtime.generate([prompt], DRAWN)
        counts, hits = runtime.stats()["speculation"], runtime.stats()["prefix_cache"]
    assert counts["draft_tokens"] > 0
    assert kind != "draft" or counts["accepted_tokens"] == counts["draft_tokens"]
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


def test_tokens_drawn_beside_sampled_drafts_are_distributed_as_the_model_says(
    tiny_folder: Path, make_tiny_folder: Callable[..., Path], run: Run
) -> None:
    """What a drafter samples by odds of its own makes no token likelier or less likely."""
    prompt, num_draws = [5, 6, 7, 8], 400
    draws = [
        SamplingParams(temperature=1.0, top_k=3, seed=seed, max_tokens=4, ignore_eos=True)
        for seed in range(num_draws)
    ]
    settings = {"max_num_seqs": 8, "num_kv_blocks": 64}
    drafter = Draft(model=make_tiny_folder(rms_norm_eps=0.5), k=2)  # the same weights, other odds
    answers, drafting = run(drafter, draws, [prompt] * num_draws, **settings)  # type: ignore[arg-type]
    assert 0 < drafting.num_accepted < drafting.num_drafted
    firsts = Counter(answer[0] for answer in answers)
    prompts = [[*prompt, first] for first in firsts]
    likeliest = SamplingParams(temperature=0, logprobs=3, max_tokens=1, ignore_eos=True)
    with Runtime.from_pretrained(tiny_folder, compile=False, dtype="float64") as runtime:
        found = runtime.generate(prompts, likeliest)
    excess, freedom = 0.0, 0
    for (first, count), output in zip(firsts.items(), found, strict=True):
        (at_first,) = output.outputs[0].logprobs or ()
        odds = {token: math.exp(one.logprob) for token, one in at_first.items()}
        seconds = Counter(answer[1] for answer in answers if answer[0] == first)
        assert seconds.keys() <= odds.keys()
        for token, own in odds.items():
            expected = count * own / sum(odds.values())
            excess += (seconds[token] - expected) ** 2 / expected
        freedom += len(odds) - 1
    assert excess < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("kind", ["draft", "eagle-3"])
@pytest.mark.parametrize("depth", [1, 2])
def test_who_is_given_up_or_preempted_amid_drafts_leaves_the_others_as_they_are(
    kind: str,
    depth: int,
    tiny_folder: Path,
    heads: dict[str, Path],
    alone: Callable[..., Answers],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(engine_builder.DEPTHS, "cpu", depth)
    drafter = Draft(model=tiny_folder, k=3) if kind == "draft" else Eagle(model=heads[kind], k=3)
    with Runtime.from_pretrained(
        tiny_folder,
        speculative=drafter,
        compile=False,
        dtype="float64",
        num_kv_blocks=11,
        max_num_seqs=4,
    ) as runtime:
        for num_seen in (1, 4):
            given_up = [runtime.stream(prompt, DRAWN) for prompt in PROMPTS[:3]]
            for stream in given_up:
                for _ in range(num_seen):
                    next(stream)
            kept = [runtime.stream(prompt, DRAWN) for prompt in PROMPTS]
            answers = [[*next(stream).token_ids] for stream in kept]
            for number, stream in enumerate(kept):
                if number < len(given_up):
                    given_up[number].close()
                for delta in stream:
                    answers[number] += delta.token_ids
            assert answers == alone(DRAWN)
        assert runtime.stats()["preemptions"] > 0
        assert runtime.stats()["blocks"]["used"] == 0
        assert runtime.stats()["speculation"]["accepted_tokens"] > (0 if kind == "draft" else -1)
