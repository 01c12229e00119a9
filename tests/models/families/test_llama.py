"""LLaMA's forward against transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lamina.models.layers import EXACT_OPS, FAST_OPS

Run = Callable[..., Tensor]
MakeFolder = Callable[..., Path]
PROMPT = [1, 17, 300, 42, 42, 5, 199, 7, 250, 3]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def assert_same_logits(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def greedy(run: Callable[[Path, list[int]], Tensor], folder: Path, count: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(int(run(folder, tokens)[-1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("ops", [FAST_OPS, EXACT_OPS], ids=["fast", "exact"])
def test_logits_equal_the_reference(
    tiny_folder: Path, logits_of: Run, reference_logits: Run, ops: Any
) -> None:
    assert_same_logits(logits_of(tiny_folder, PROMPT, ops=ops), reference_logits(tiny_folder, PROMPT))


def test_a_head_dim_of_its_own_is_honoured(
    make_tiny_folder: MakeFolder, logits_of: Run, reference_logits: Run
) -> None:
    folder = make_tiny_folder(head_dim=32)
    assert greedy(logits_of, folder, 20) == greedy(reference_logits, folder, 20)
    assert_same_logits(logits_of(folder, PROMPT), reference_logits(folder, PROMPT))


@pytest.mark.parametrize(
    "biases",
    [{"attention_bias": True}, {"mlp_bias": True}, {"attention_bias": True, "mlp_bias": True}],
    ids=str,
)
def test_every_bias_is_used(
    make_tiny_folder: MakeFolder, logits_of: Run, reference_logits: Run, biases: dict[str, bool]
) -> None:
    folder = make_tiny_folder(**biases)
    assert_same_logits(logits_of(folder, PROMPT), reference_logits(folder, PROMPT))


def test_rope_theta_holds_at_far_positions(
    make_tiny_folder: MakeFolder, logits_of: Run, reference_logits: Run
) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    folder = make_tiny_folder(max_position_embeddings=2048, rope_parameters=rope)
    prompt = [(7 * i) % 317 + 3 for i in range(1600)]
    ours, theirs = logits_of(folder, prompt), reference_logits(folder, prompt)
    assert_same_logits(ours[[5, 1500, 1599]], theirs[[5, 1500, 1599]])


def test_llama3_rope_holds_within_and_beyond_its_original_length(
    make_tiny_folder: MakeFolder, logits_of: Run, reference_logits: Run
) -> None:
    rope = {**LLAMA3, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    folder = make_tiny_folder(rope_parameters=rope)
    prompt = [(11 * i) % 317 + 3 for i in range(201)]
    ours, theirs = logits_of(folder, prompt), reference_logits(folder, prompt)
    assert_same_logits(ours[[0, 63, 64, 200]], theirs[[0, 63, 64, 200]])


def test_bfloat16_errs_no_more_than_the_reference_in_bfloat16(
    tiny_folder: Path,
    logits_of: Run,
    reference_logits: Run,
    tiny_reference: Callable[[Path], Any],
    assert_close_to_reference: Callable[..., None],
) -> None:
    from transformers import LlamaForCausalLM

    naive = LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.inference_mode():
        naive_logits = naive.eval()(torch.tensor([PROMPT])).logits[0]
    ours = logits_of(tiny_folder, PROMPT, dtype=torch.bfloat16)
    assert ours.dtype == torch.bfloat16
    assert_close_to_reference(ours, reference_logits(tiny_folder, PROMPT), naive_logits)


def test_float64_stays_float64_throughout(tiny_folder: Path, logits_of: Run, reference_logits: Run) -> None:
    ours = logits_of(tiny_folder, PROMPT, dtype=torch.float64)
    assert ours.dtype == torch.float64
    assert_same_logits(ours.float(), reference_logits(tiny_folder, PROMPT))


@settings(max_examples=8)
@given(
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 8, 16, 20]),
    layers=st.integers(1, 3),
    tied=st.booleans(),
    bias=st.booleans(),
)
def test_logits_equal_the_reference_for_any_shape(
    make_tiny_folder: MakeFolder,
    logits_of: Run,
    reference_logits: Run,
    kv_heads: int,
    group: int,
    head_dim: int,
    layers: int,
    tied: bool,
    bias: bool,
) -> None:
    folder = make_tiny_folder(
        hidden_size=kv_heads * group * 8,  # transformers wants a multiple of the number of heads
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_hidden_layers=layers,
        intermediate_size=24,
        vocab_size=320,
        tie_word_embeddings=tied,
        attention_bias=bias,
        mlp_bias=not bias,
    )
    assert_same_logits(logits_of(folder, PROMPT), reference_logits(folder, PROMPT))


def test_head_counts_that_do_not_divide_the_hidden_size_work_with_a_head_dim(
    make_tiny_folder: MakeFolder, changed: Callable[..., Path], logits_of: Run, reference_logits: Run
) -> None:
    """transformers refuses such a config, so the third head is one whose output counts for nothing."""
    folder = make_tiny_folder(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    tensors = _with_a_silent_head(folder)
    wider = changed(folder, config={"num_attention_heads": 3}, tensors=tensors)
    assert_same_logits(logits_of(wider, PROMPT), reference_logits(folder, PROMPT))


def _with_a_silent_head(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    changed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("q_proj.weight"):
            changed[name] = torch.cat((tensor, torch.ones(16, 64)))
        elif name.endswith("o_proj.weight"):
            changed[name] = torch.cat((tensor, torch.zeros(64, 16)), dim=1)
    return changed


def test_attention_is_called_once_a_layer_in_order_and_values_may_be_views(tiny_folder: Path) -> None:
    from lamina.models.checkpoints.weights import dummy_weights
    from lamina.models.config import read_model_config
    from lamina.models.registry import find_model
    from lamina.models.rope import rope_tables

    config = read_model_config(tiny_folder)
    model = find_model(config.architecture)
    weights = dummy_weights(model, config, dtype=torch.float32, device="cpu", seed=0).by_name
    weights["rope_cos"], weights["rope_sin"] = rope_tables(
        config, max_model_len=8, dtype=torch.float32, device="cpu"
    )
    seen = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        seen.append((layer, tuple(query.shape), tuple(key.shape), tuple(value.shape), out.is_contiguous()))
        out.zero_()

    ids = torch.tensor([5, 6, 7], dtype=torch.int32)
    hidden = model.forward(config, weights, ids, torch.arange(3, dtype=torch.int32), attend, FAST_OPS)
    assert hidden.shape == (3, config.hidden_size)
    assert seen == [(i, (3, 4, 16), (3, 2, 16), (3, 2, 16), True) for i in range(config.num_layers)]
