"""Heads compute what transformers' own layers do of the same weights, however their files name them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.heads import RandomHead
from torch import Tensor

from lamina.common.errors import ConfigError, LoadError, UnsupportedError
from lamina.custom_ops.paged_attention.reference import dense_attention
from lamina.models.checkpoints.weights import load_weights
from lamina.models.config import ModelConfig
from lamina.models.heads.checkpoint import read_head, target_ids
from lamina.models.heads.definition import STATES, check_head
from lamina.models.layers import EXACT_OPS, FAST_OPS, Ops
from lamina.models.rope import rotation_tables

EAGLE1, EAGLE3 = {"is_third": False}, {"is_third": True}
KINDS: dict[str, dict[str, Any]] = {
    "eagle-1": EAGLE1,
    "eagle-1 with a bias": EAGLE1 | {"fc_bias": True},
    "eagle-1 of two layers": EAGLE1 | {"changes": {"num_hidden_layers": 2}},
    "eagle-3": EAGLE3,
    "eagle-3 of few ids": EAGLE3 | {"draft_vocab_size": 50},
    "eagle-3 with a norm before the residual": EAGLE3 | {"norm_before_residual": True},
    "eagle-3 with a norm before fc": EAGLE3 | {"norm_before_fc": True},
    "eagle-3 with normed output": EAGLE3 | {"norm_output": True},
    "eagle-3 of two sums": EAGLE3
    | {"num_sums": 2, "changes": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}}},
    "eagle-3 of two layers": EAGLE3 | {"changes": {"num_hidden_layers": 2}},
}
TARGET = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)


def states_of(folder: Path, token_ids: Tensor, given: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
    """The head's states and, of EAGLE-3, their logits; `given` are the target's."""
    head = read_head(folder)
    assert head.checkpoint is not None
    weights = load_weights(head.checkpoint, dtype=torch.float32, device="cpu").by_name
    weights |= rotation_tables(head.config, max_model_len=64, dtype=torch.float32, device="cpu")
    definition, specs = head.definition, head.definition.attention(head.config)
    weights[STATES] = definition.combine(head.config, weights, given, ops)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        out.copy_(dense_attention(query, key, value, specs[layer].scale))

    positions = torch.arange(len(token_ids), dtype=torch.int32)
    states = definition.forward(head.config, weights, token_ids.int(), positions, attend, ops)
    logits = definition.logits(head.config, weights, states, ops) if "lm_head" in weights else states
    return states, logits


@pytest.mark.parametrize("ops", [FAST_OPS, EXACT_OPS], ids=["fast", "exact"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_computes_what_transformers_layers_do(kind: str, ops: Ops, tmp_path: Path) -> None:
    head = RandomHead(**KINDS[kind])
    torch.manual_seed(1)
    token_ids = torch.randint(0, 320, (23,))
    given = torch.randn(23, head.fc.in_features if head.is_third else 64)
    states, logits = states_of(head.save(tmp_path), token_ids, given, ops)
    expected = head.states(token_ids, head.combined(given))
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
    if head.is_third:
        torch.testing.assert_close(logits, head.logits(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("names", [{"first_layer": "layers.0"}, {"prefix": "model."}], ids=str)
def test_a_head_is_read_by_any_of_the_names_in_use(names: dict[str, str], tmp_path: Path) -> None:
    head, token_ids, given = RandomHead(**EAGLE3), torch.arange(9), torch.ones(9, 192)
    ours, _ = states_of(head.save(tmp_path / "one", **names), token_ids, given, FAST_OPS)
    theirs, _ = states_of(head.save(tmp_path / "other"), token_ids, given, FAST_OPS)
    assert torch.equal(ours, theirs)


def test_a_config_whose_llama_part_lies_in_an_object_is_read(tmp_path: Path) -> None:
    head = RandomHead(**EAGLE3, draft_vocab_size=60)
    plain, folder = head.save(tmp_path / "plain"), head.save(tmp_path / "nested")
    raw = json.loads((folder / "config.json").read_text())
    nested = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": raw.pop("draft_vocab_size"),
        "target_hidden_size": None,
        "transformer_layer_config": raw,
    }
    (folder / "config.json").write_text(json.dumps(nested))
    assert read_head(folder).config == read_head(plain).config


def test_the_map_of_ids_is_that_of_the_file(tmp_path: Path) -> None:
    head = RandomHead(**EAGLE3, draft_vocab_size=50)
    ids = target_ids(read_head(head.save(tmp_path)))
    assert ids is not None
    assert ids.tolist() == head.target_ids.tolist()


def test_a_head_that_drafts_all_ids_without_a_map_drafts_them_as_they_are(tmp_path: Path) -> None:
    folder = RandomHead(**EAGLE3).save(tmp_path)
    tensors = {k: v for k, v in load_file(folder / "model.safetensors").items() if k not in ("d2t", "t2d")}
    save_file(tensors, folder / "model.safetensors")
    assert target_ids(read_head(folder)) is None


def broken(head: RandomHead, folder: Path, **changed: Tensor | None) -> Path:
    head.save(folder)
    tensors = {**load_file(folder / "model.safetensors"), **changed}
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"d2t": None, "t2d": None}, "has no tensor d2t"),
        ({"d2t": torch.zeros(49, dtype=torch.int64)}, "wanted 50 integers"),
        ({"d2t": torch.full((50,), 300)}, "no 50 different ones below 320"),
        ({"d2t": torch.full((50,), -1)}, "no 50 different ones below 320"),
        ({"d2t": -torch.arange(50)}, "no 50 different ones below 320"),
        ({"t2d": torch.ones(320, dtype=torch.bool)}, "name different ids"),
    ],
)
def test_a_damaged_map_of_ids_is_refused(
    changed: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    head = read_head(broken(RandomHead(**EAGLE3, draft_vocab_size=50), tmp_path, **changed))
    with pytest.raises(LoadError, match=message):
        target_ids(head)


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3"])
def test_a_head_for_this_target_is_taken(kind: str, tmp_path: Path) -> None:
    head = read_head(RandomHead(**KINDS[kind]).save(tmp_path))
    check_head(head.config, head.definition, TARGET)


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3"])
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"hidden_size": 32}, "hidden_size of the target of 64.*has 32"),
        ({"vocab_size": 321}, "vocab_size of 320"),
    ],
    ids=str,
)
def test_a_head_for_another_target_is_refused_with_both_sizes(
    kind: str, target: dict[str, int], message: str, tmp_path: Path
) -> None:
    head = read_head(RandomHead(**KINDS[kind]).save(tmp_path))
    with pytest.raises(ConfigError, match=message):
        check_head(head.config, head.definition, replace(TARGET, **target))


@pytest.mark.parametrize(("depth", "layers"), [(4, [0, 1, 5]), (2, None)])
def test_sums_of_layers_that_the_target_has_not_are_refused(
    depth: int, layers: list[int] | None, tmp_path: Path
) -> None:
    changes = {} if layers is None else {"eagle_config": {"eagle_aux_hidden_state_layer_ids": layers}}
    head = read_head(RandomHead(**EAGLE3, changes=changes).save(tmp_path))
    with pytest.raises(ConfigError, match="residual sums of layers"):
        check_head(head.config, head.definition, replace(TARGET, num_layers=depth))


def test_a_model_of_its_own_is_no_head(tiny_folder: Path) -> None:
    with pytest.raises(LoadError, match=r"no tensor fc\.weight.*Draft\(model\)"):
        read_head(tiny_folder)


@pytest.mark.parametrize("changes", [{"fc_norm": True}, {"eagle_config": {"use_aux_hidden_state": False}}])
def test_a_head_of_another_kind_is_refused_by_the_name_of_its_field(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=r"fc_norm is true|use_aux_hidden_state is false"):
        read_head(RandomHead(**EAGLE3, changes=changes).save(tmp_path))
