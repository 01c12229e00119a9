"""Loading, inventing and faking weights."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from lamina.common.errors import LoadError
from lamina.models.checkpoints import weights as weights_module
from lamina.models.checkpoints.weights import dummy_weights, load_weights, read_checkpoint
from lamina.models.config import read_model_config
from lamina.models.registry import find_model

Change = Callable[..., Path]
Run = Callable[..., Tensor]
PROMPT = [1, 17, 300, 42]


def load(folder: Path, dtype: torch.dtype = torch.float32, **kwargs: Any) -> dict[str, Tensor]:
    config = read_model_config(folder)
    checkpoint = read_checkpoint(find_model(config.architecture), config, folder)
    return load_weights(checkpoint, dtype=dtype, device="cpu", **kwargs).by_name


@pytest.fixture
def sharded(tiny_reference: Callable[[Path], Any], tiny_folder: Path, tmp_path: Path) -> Path:
    """TINY in several files with an index."""
    tiny_reference(tiny_folder).save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    return tmp_path / "sharded"


def test_fused_tensors_hold_the_checkpoints_rows_in_order(tiny_folder: Path) -> None:
    held, loaded = load_file(tiny_folder / "model.safetensors"), load(tiny_folder)
    attention = "model.layers.1.self_attn"
    expected = torch.cat([held[f"{attention}.{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(loaded["layers.1.qkv"], expected)
    assert torch.equal(loaded["layers.0.down"], held["model.layers.0.mlp.down_proj.weight"])
    assert all(tensor.is_contiguous() for tensor in loaded.values())


def test_weights_are_converted_while_they_are_copied(tiny_folder: Path) -> None:
    whole, half = load(tiny_folder), load(tiny_folder, torch.bfloat16)
    assert all(torch.equal(half[name], tensor.bfloat16()) for name, tensor in whole.items())


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_a_checkpoint_of_any_dtype_is_converted_to_the_one_that_serves(
    tiny_folder: Path, tmp_path: Path, stored: torch.dtype
) -> None:
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    held = {name: tensor.to(stored) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(held, tmp_path / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        embedding = load(tmp_path, dtype)["embedding"]
        assert torch.equal(embedding, held["model.embed_tokens.weight"].to(dtype))


def test_a_sharded_checkpoint_loads_like_a_single_file(tiny_folder: Path, sharded: Path) -> None:
    single, shards = load(tiny_folder), load(sharded)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert single.keys() == shards.keys()
    assert all(torch.equal(single[name], shards[name]) for name in single)


def test_a_file_is_mapped_anew_when_much_of_it_was_read(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(tiny_folder)
    monkeypatch.setattr(weights_module, "MAPPED_BYTES", 5000)
    loaded = load(tiny_folder)
    assert all(torch.equal(expected[name], loaded[name]) for name in expected)


def test_a_missing_shard_is_an_incomplete_download(sharded: Path) -> None:
    missing = sorted(sharded.glob("*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(LoadError, match=f"incomplete download: {missing.name}"):
        load(sharded)


def test_files_that_the_index_does_not_name_are_ignored(sharded: Path, tiny_folder: Path) -> None:
    expected = load(sharded)
    other = {name: tensor + 1 for name, tensor in load_file(tiny_folder / "model.safetensors").items()}
    for name in ("extra.safetensors", "consolidated.safetensors", "model.safetensors"):
        save_file(other, sharded / name)
    loaded = load(sharded)
    assert all(torch.equal(expected[name], loaded[name]) for name in expected)


def test_an_index_that_its_files_contradict_is_refused(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shards = sorted(set(index["weight_map"].values()))
    wrong = shards[0] if index["weight_map"]["model.norm.weight"] != shards[0] else shards[1]
    index["weight_map"]["model.norm.weight"] = wrong
    path.write_text(json.dumps(index))
    with pytest.raises(LoadError, match=r"model\.norm\.weight"):
        load(sharded)


def test_a_shard_whose_name_no_file_can_have_is_missing(sharded: Path) -> None:
    placed = {"model.norm.weight": "a" * 300}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(LoadError, match="incomplete download: aaa"):
        load(sharded)


@pytest.mark.parametrize("weight_map", [None, {"a": 1}, {"a": "../elsewhere.safetensors"}], ids=str)
def test_an_index_without_file_names_beside_it_is_refused(sharded: Path, weight_map: Any) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(LoadError, match="no weight_map"):
        load(sharded)


@pytest.mark.parametrize("kept", [0, 4, 100, -1], ids=lambda kept: f"first {kept} bytes")
def test_a_file_cut_short_is_named(tiny_folder: Path, changed: Change, kept: int) -> None:
    path = changed(tiny_folder) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(LoadError, match=r"model\.safetensors is damaged or cut short"):
        load(path.parent)


@given(changes=st.dictionaries(st.integers(0, 2000), st.integers(0, 255), min_size=1, max_size=3))
def test_a_damaged_header_raises_our_errors_alone(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory, changes: dict[int, int]
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(tiny_folder, folder, dirs_exist_ok=True)
    content = bytearray((folder / "model.safetensors").read_bytes())
    for place, value in changes.items():
        content[place] = value
    (folder / "model.safetensors").write_bytes(content)
    with contextlib.suppress(LoadError):
        load(folder)


def test_a_tensor_without_a_place_is_named(tiny_folder: Path, changed: Change) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    with pytest.raises(LoadError, match=f"gives no place: {name}"):
        load(changed(tiny_folder, tensors={name: torch.zeros(64)}))


def test_a_bias_of_the_head_of_a_tied_model_is_named(make_tiny_folder: Change, changed: Change) -> None:
    folder = make_tiny_folder(tie_word_embeddings=True)
    with pytest.raises(LoadError, match=r"gives no place: lm_head\.bias"):
        load(changed(folder, tensors={"lm_head.bias": torch.zeros(320)}))


def test_a_place_without_a_tensor_is_named(tiny_folder: Path, changed: Change) -> None:
    with pytest.raises(LoadError, match=r"lacks tensors.*: model\.norm\.weight"):
        load(changed(tiny_folder, tensors={"model.norm.weight": None}))


def test_a_wrong_shape_is_named_with_both_shapes(tiny_folder: Path, changed: Change) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(LoadError, match=rf"{name} in .* has shape \[16, 64\].*calls for \[32, 64\]"):
        load(changed(tiny_folder, tensors={name: torch.zeros(16, 64)}))


def test_integers_in_place_of_weights_are_refused(tiny_folder: Path, changed: Change) -> None:
    tensors = {"model.norm.weight": torch.zeros(64, dtype=torch.int8)}
    with pytest.raises(LoadError, match=r"model\.norm\.weight.*torch\.int8"):
        load(changed(tiny_folder, tensors=tensors))


def test_rotary_buffers_of_old_checkpoints_are_passed_over(tiny_folder: Path, changed: Change) -> None:
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
    assert load(changed(tiny_folder, tensors=buffers)).keys() == load(tiny_folder).keys()


def test_a_tied_head_is_the_embedding_itself(
    make_tiny_folder: Change, logits_of: Run, reference_logits: Run
) -> None:
    folder = make_tiny_folder(tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    loaded = load(folder)
    assert loaded["lm_head"] is loaded["embedding"]
    torch.testing.assert_close(
        logits_of(folder, PROMPT), reference_logits(folder, PROMPT), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("shift, warnings", [(0.0, 0), (0.5, 1)], ids=["equal", "differing"])
def test_a_stored_head_of_a_tied_model_loses_to_the_embedding(
    make_tiny_folder: Change,
    changed: Change,
    logits_of: Run,
    caplog: pytest.LogCaptureFixture,
    shift: float,
    warnings: int,
) -> None:
    folder = make_tiny_folder(tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    with_head = changed(folder, tensors={"lm_head.weight": embedding + shift})
    assert torch.equal(logits_of(with_head, PROMPT), logits_of(folder, PROMPT))
    assert [record.message.split()[0] for record in caplog.records] == ["lm_head.weight"] * warnings


def test_an_untied_head_that_is_absent_is_an_error(tiny_folder: Path, changed: Change) -> None:
    with pytest.raises(LoadError, match=r"lacks tensors.*lm_head\.weight"):
        load(changed(tiny_folder, tensors={"lm_head.weight": None}))


@pytest.mark.parametrize(
    "other, remedy",
    [
        ("pytorch_model.bin", "convert pytorch_model.bin"),
        ("a.gguf", "pass the GGUF file"),
        ("x.txt", "download"),
    ],
)
def test_a_folder_without_safetensors_says_what_to_do(
    tiny_folder: Path, tmp_path: Path, other: str, remedy: str
) -> None:
    shutil.copy(tiny_folder / "config.json", tmp_path)
    (tmp_path / other).touch()
    with pytest.raises(LoadError, match=f"neither model.safetensors nor.*{remedy}"):
        load(tmp_path)


def test_progress_only_grows_and_ends_at_one(sharded: Path) -> None:
    seen: list[tuple[str, float]] = []
    load(sharded, progress=lambda stage, fraction, detail: seen.append((stage, fraction)))
    fractions = [fraction for _, fraction in seen]
    assert {stage for stage, _ in seen} == {"weights"}
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


@pytest.mark.parametrize("tied", [False, True])
def test_real_and_dummy_weights_have_the_same_names_shapes_and_dtypes(
    make_tiny_folder: Change, tied: bool
) -> None:
    folder = make_tiny_folder(tie_word_embeddings=tied, attention_bias=True)
    config = read_model_config(folder)
    model = find_model(config.architecture)
    real = load(folder, torch.bfloat16)
    dummy = dummy_weights(model, config, dtype=torch.bfloat16, device="cpu", seed=0).by_name

    def described(weights: dict[str, Tensor]) -> dict[str, Any]:
        return {name: (tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in weights.items()}

    assert described(real) == described(dummy)
    assert all((w["lm_head"] is w["embedding"]) == tied for w in (real, dummy))


def test_dummy_weights_follow_from_the_seed(tiny_folder: Path) -> None:
    config = read_model_config(tiny_folder)
    model = find_model(config.architecture)
    first, again, other = (
        dummy_weights(model, config, dtype=torch.float32, device="cpu", seed=seed).by_name
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["layers.0.qkv"], other["layers.0.qkv"])
    assert torch.equal(first["final_norm"], torch.ones(64))
