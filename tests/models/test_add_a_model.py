"""The page on adding a model, run."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from lamina.models.layers import EXACT_OPS, FAST_OPS, Ops

PAGE = Path(__file__).parents[2] / "docs" / "add_a_model.md"
PROMPT = [1, 17, 300, 42, 42, 5, 199, 7]
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module", autouse=True)
def page() -> None:
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), {"__name__": "page"})


def make_mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None))


def make_qwen3() -> PreTrainedModel:
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # made as ones, which would hide a norm that is dropped
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return model


@pytest.mark.parametrize("ops", [FAST_OPS, EXACT_OPS], ids=["fast", "exact"])
@pytest.mark.parametrize("make", [make_mistral, make_qwen3])
def test_the_models_of_the_page_compute_what_transformers_does(
    make: Callable[[], PreTrainedModel], ops: Ops, tmp_path: Path, logits_of: Callable[..., Tensor]
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().eval()
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(
        logits_of(tmp_path, PROMPT, ops=ops), _reference(model, PROMPT), rtol=1e-4, atol=1e-4
    )


def _reference(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits
