"""A TINY model, adapters of it that PEFT wrote, and the answers of the models that it merges them into."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lamina import Runtime, SamplingParams
from lamina.runtime.adapters.config import LoRAConfig

from ...adapters import write_adapter, write_merged

NUM_ADAPTERS = 3
CONFIGS: list[dict[str, Any]] = [
    {},
    {"r": 2, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True},
    {"r": 8, "lora_alpha": 3, "rank_pattern": {"up_proj": 3}},
]
PROMPTS = [[1, 5, 9, 20], [7, 8, 200, 31, 4, 4, 19], [3] * 21]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SMALL: dict[str, Any] = {
    "compile": False,
    "dtype": "float32",
    "num_kv_blocks": 96,
    "block_size": 8,
    "max_model_len": 96,
}


def tokens(outputs: Any) -> list[tuple[int, ...]]:
    """Of the first answer to each prompt."""
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@dataclass(frozen=True)
class Tuned:
    """A model's folder, the folders of its adapters, and the same merged into it."""

    base: Path
    adapters: tuple[Path, ...]
    merged: tuple[Path, ...]
    answers: dict[int | None, list[tuple[int, ...]]]  # to PROMPTS; None: the model's own

    def runtime(self, *, lora: LoRAConfig | None = None, **settings: Any) -> Runtime:
        """With room for two adapters, and all of them loaded by the names a0, a1, …"""
        lora = lora or LoRAConfig(max_loras=2, max_lora_rank=8)
        made = Runtime.from_pretrained(self.base, lora=lora, **{**SMALL, **settings})
        for number, folder in enumerate(self.adapters):
            made.load_adapter(f"a{number}", folder)
        return made


@pytest.fixture(scope="session")
def tuned(tiny_text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    root = tmp_path_factory.mktemp("tuned")
    adapters = [
        write_adapter(tiny_text_folder, root / f"a{number}", seed=number, **config)
        for number, config in enumerate(CONFIGS)
    ]
    merged = [
        write_merged(tiny_text_folder, one, root / f"merged{number}") for number, one in enumerate(adapters)
    ]
    answers: dict[int | None, list[tuple[int, ...]]] = {}
    for number, folder in enumerate([tiny_text_folder, *merged], start=-1):
        with Runtime.from_pretrained(folder, **SMALL) as runtime:
            answers[None if number < 0 else number] = tokens(runtime.generate(PROMPTS, GREEDY))
    assert len(set(map(tuple, answers.values()))) == 1 + NUM_ADAPTERS
    return Tuned(tiny_text_folder, tuple(adapters), tuple(merged), answers)


@pytest.fixture
def runtime(tuned: Tuned) -> Iterator[Runtime]:
    with tuned.runtime() as made:
        yield made


@pytest.fixture
def answers_of() -> Callable[..., list[tuple[int, ...]]]:
    return lambda runtime, name, **more: tokens(runtime.generate(PROMPTS, GREEDY, adapter=name, **more))
