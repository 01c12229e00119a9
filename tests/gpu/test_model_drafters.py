"""Models and heads that draft on a GPU, captured and not: the tokens are those of the model alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.heads import RandomHead

from lamina import CompileConfig, Draft, Eagle, Runtime, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROMPTS = [[3 + (7 * row + 3 * column) % 40 for column in range(5 + 9 * row)] for row in range(7)]
SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cuda", "max_num_seqs": 8, "num_kv_blocks": 128}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=90, ignore_eos=True),
    [SamplingParams(temperature=0.4, seed=row, max_tokens=90, ignore_eos=True) for row in range(7)],
]


@pytest.fixture(scope="module")
def answers(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """answers(drafter, cuda_graphs) -> token ids of greedy and drawn answers, and the counts of drafts."""
    cache = tmp_path_factory.mktemp("cache")

    def generate(speculative: Any, cuda_graphs: Any = "auto", **settings: Any) -> tuple[Any, Any]:
        config = CompileConfig(cuda_graphs=cuda_graphs)
        with Runtime.from_pretrained(
            tiny_folder, cache_dir=cache, compile=config, speculative=speculative, **SETTINGS | settings
        ) as runtime:
            found = [runtime.generate(PROMPTS, params) for params in PARAMS]
            stats = runtime.stats()
        return [[one.outputs[0].token_ids for one in some] for some in found], stats

    return generate


@pytest.fixture(scope="module")
def alone(answers: Callable[..., Any]) -> Any:
    return answers(None)[0]


@pytest.mark.parametrize("cuda_graphs", ["auto", "off"])
@pytest.mark.parametrize("k", [1, 3])
def test_a_twin_drafts_what_the_model_draws(
    k: int, cuda_graphs: str, tiny_folder: Path, answers: Callable[..., Any], alone: Any
) -> None:
    found, stats = answers(Draft(model=tiny_folder, k=k), cuda_graphs)
    assert found == alone
    counts = stats["speculation"]
    assert counts["accepted_tokens"] >= 0.95 * counts["draft_tokens"] > 0, "all but near-ties"


@pytest.mark.parametrize("cuda_graphs", ["auto", "off"])
@pytest.mark.parametrize("is_third", [False, True], ids=["eagle-1", "eagle-3"])
def test_a_head_changes_no_answer(
    is_third: bool, cuda_graphs: str, tmp_path: Path, answers: Callable[..., Any], alone: Any
) -> None:
    changes = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}} if is_third else {}
    size = 50 if is_third else 320
    head = RandomHead(is_third=is_third, changes=changes, draft_vocab_size=size).save(tmp_path)
    found, stats = answers(Eagle(model=head, k=3), cuda_graphs)
    assert found == alone
    assert stats["speculation"]["draft_tokens"] > 0
    if cuda_graphs == "auto":
        assert stats["cuda_graphs"]["replays"] > stats["cuda_graphs"]["eager_steps"]


def test_drafters_beside_keys_and_values_in_fp8(
    tiny_folder: Path, tmp_path: Path, answers: Callable[..., Any]
) -> None:
    narrow = {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}
    head = RandomHead(is_third=False).save(tmp_path)
    for speculative in (Draft(model=tiny_folder, k=3), Eagle(model=head, k=3)):
        found, stats = answers(speculative, **narrow)
        assert [len(one) for some in found for one in some] == [90] * 14
        assert stats["speculation"]["draft_tokens"] > 0
