"""Logits of requests whose adapters share a step, beside those of the models that PEFT merges them into."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina import Runtime, SamplingParams
from lamina.runtime.adapters.config import LoRAConfig

from ...adapters import write_adapter
from .conftest import PROMPTS, SMALL

NUM_ADAPTERS, VOCAB = 8, 267  # ids that are text
CONFIGS: list[dict[str, Any]] = [
    {},
    {"r": 2, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True},
    {"r": 8, "lora_alpha": 3, "rank_pattern": {"up_proj": 3}},
    {"r": 1, "target_modules": ["o_proj"]},
]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
Asked = list[int | None]  # an adapter for each prompt, None: the model as it is


class Merged:
    """Folders of adapters, and log-probabilities of the next token by the model that each is merged into."""

    def __init__(self, base: Path, adapters: list[Path]) -> None:
        self.base, self.adapters = base, adapters
        self.by_dtype: dict[str, dict[int | None, Tensor]] = {name: {} for name in DTYPES}
        for adapter, folder in [(None, None), *enumerate(adapters)]:
            for name, rows in next_tokens(base, folder):
                self.by_dtype[name][adapter] = rows  # [len(PROMPTS), VOCAB]

    def rows(self, dtype: str, which: Asked) -> Tensor:
        """Of the prompts in turn, each by its adapter."""
        found = self.by_dtype[dtype]
        return torch.stack([found[adapter][place % len(PROMPTS)] for place, adapter in enumerate(which)])


@pytest.fixture(scope="module")
def merged(tiny_text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Merged:
    root = tmp_path_factory.mktemp("eight")
    folders = [
        write_adapter(
            tiny_text_folder, root / f"a{seed}", seed=seed, size=0.15, **CONFIGS[seed % len(CONFIGS)]
        )
        for seed in range(NUM_ADAPTERS)
    ]
    return Merged(tiny_text_folder, folders)


def next_tokens(base: Path, adapter: Path | None) -> Iterator[tuple[str, Tensor]]:
    """By transformers, in each dtype: weights are merged in float64 and rounded."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    if adapter is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(model, adapter).double().merge_and_unload()
    for name, dtype in DTYPES.items():  # the widest first, as what is rounded stays so
        model = model.to(dtype)
        with torch.inference_mode():
            rows = [model(torch.tensor([prompt])).logits[0, -1, :VOCAB] for prompt in PROMPTS]
        yield name, torch.stack(rows).double().log_softmax(-1)


@pytest.fixture(scope="module")
def opened(merged: Merged) -> Iterator[Callable[[str, int], Runtime]]:
    """opened(dtype, slots) -> a runtime with room for so many adapters, the same each time."""
    runtimes: dict[tuple[str, int], Runtime] = {}

    def find(dtype: str, slots: int) -> Runtime:
        if (dtype, slots) not in runtimes:
            lora = LoRAConfig(max_loras=slots, max_lora_rank=8, max_held=1)
            wanted = {**SMALL, "dtype": dtype, "prefix_cache": False}
            runtimes[dtype, slots] = Runtime.from_pretrained(merged.base, lora=lora, **wanted)
        return runtimes[dtype, slots]

    yield find
    for runtime in runtimes.values():
        runtime.close()


def load_just(runtime: Runtime, wanted: set[int], merged: Merged) -> None:
    """Unload and load until these adapters can be asked, and no other."""
    for name in {*runtime.adapters} - {f"a{number}" for number in wanted}:
        runtime.unload_adapter(name)
    for number in sorted(wanted):
        if f"a{number}" not in runtime.adapters:
            runtime.load_adapter(f"a{number}", merged.adapters[number])


def asked(runtime: Runtime, which: Asked) -> Tensor:
    """Log-probabilities of the next token of prompts in turn, computed together."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=VOCAB)
    answers = []
    for place, adapter in enumerate(which):
        options = runtime._options({"adapter": None if adapter is None else f"a{adapter}"})
        answers += runtime._open_input.prepare_each([PROMPTS[place % len(PROMPTS)]], params, options)
    runtime._client.run([one for answer in answers for one in answer.submissions])
    tops = [answer.output().outputs[0].logprobs[0] for answer in answers]
    return torch.tensor([[top[id_].logprob for id_ in range(VOCAB)] for top in tops], dtype=torch.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_adapters_beside_the_base_model_have_the_logits_of_merged_weights(
    count: int, dtype: str, merged: Merged, opened: Any, assert_close_to_reference: Callable[..., None]
) -> None:
    """In float32 but for rounding; in bfloat16 at most twice as far off as weights merged in it."""
    which: Asked = [None, *range(count), *reversed(range(count)), None, *range(count)]
    runtime = opened(dtype, count)
    load_just(runtime, {*range(count)}, merged)
    found, exact = asked(runtime, which), merged.rows("float64", which)
    for adapter in {*which}:
        own = torch.tensor([one == adapter for one in which])
        naive = merged.rows(dtype, which)[own]
        assert_close_to_reference(found[own], exact[own], naive, floor=2e-5)
    is_adapted = torch.tensor([one is not None for one in which])
    plain = merged.rows("float64", [None] * len(which))
    assert (exact - plain)[is_adapted].abs().amax(1).min() > 0.2, "adapters that add something"


ROUNDS = st.lists(
    st.lists(st.none() | st.integers(0, NUM_ADAPTERS - 1), min_size=1, max_size=12), min_size=1, max_size=5
)


@given(rounds=ROUNDS, slots=st.sampled_from([1, 2, 8]))
def test_logits_stay_right_while_adapters_come_and_go_under_traffic(
    rounds: list[Asked], slots: int, merged: Merged, opened: Any
) -> None:
    """A long answer goes on beside every round, by an adapter that may be unloaded meanwhile."""
    runtime = opened("float32", slots)
    streams: list[Any] = []
    for which in rounds:
        load_just(runtime, {one for one in which if one is not None}, merged)
        name = None if which[0] is None else f"a{which[0]}"
        many = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        streams = [*streams[-2:], runtime.stream(PROMPTS[0], many, adapter=name)]
        for stream in streams:
            next(stream, None)
        assert (asked(runtime, which) - merged.rows("float64", which)).abs().max() < 5e-5
    for stream in streams:
        stream.close()
