"""What lies in a checkpoint's folder, in whatever state a download, a clone or a converter left it."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file, save_model

from lamina import Runtime, SamplingParams
from lamina.common.errors import ConfigError, LoadError
from lamina.common.store import Store
from lamina.models.checkpoints.source import resolve_source
from lamina.models.checkpoints.weights import read_checkpoint
from lamina.models.config import ModelConfig, read_model_config
from lamina.models.generation_config import read_generation_config

from .test_weights import Run, load

Change = Callable[..., Path]
PROMPT = [1, 17, 300, 42]
HUGE = 2**31 - 1
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


@pytest.fixture
def tied(make_tiny_folder: Change) -> Path:
    return make_tiny_folder(tie_word_embeddings=True)


def test_a_tied_model_may_hold_its_head_alone(
    tied: Path, tmp_path: Path, tiny_reference: Callable[[Path], Any], logits_of: Run
) -> None:
    """safetensors' save_model keeps one name of tensors that share memory, and not always the embedding's."""
    shutil.copytree(tied, tmp_path, dirs_exist_ok=True)
    save_model(tiny_reference(tied), str(tmp_path / "model.safetensors"))
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "lm_head.weight" in names
    assert "model.embed_tokens.weight" not in names
    assert torch.equal(logits_of(tmp_path, PROMPT), logits_of(tied, PROMPT))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_head_alone_serves_quantized_and_sharded(
    tied: Path, tmp_path: Path, quantization: str | None
) -> None:
    shutil.copytree(tied, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    (tmp_path / "model.safetensors").unlink()
    shards = {"a.safetensors": {}, "b.safetensors": {}}
    for place, name in enumerate(sorted(tensors)):
        shards["ab"[place % 2] + ".safetensors"][name] = tensors[name]
    for shard, held in shards.items():
        save_file(held, tmp_path / shard)
    _write_index(tmp_path, {name: shard for shard, held in shards.items() for name in held})
    settings: dict[str, Any] = {"compile": False, "quantization": quantization, "dtype": "float32"}
    answers = []
    for folder in (tied, tmp_path):
        with Runtime.from_pretrained(folder, **settings) as runtime:
            output = runtime.generate([PROMPT], SamplingParams(temperature=0, max_tokens=6))[0]
            answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]


def test_a_head_of_another_shape_than_its_embedding_is_named(tied: Path, changed: Change) -> None:
    wrong = {"model.embed_tokens.weight": None, "lm_head.weight": torch.ones(319, 64)}
    with pytest.raises(LoadError, match=r"lm_head.weight .* has shape \[319, 64\].*\[320, 64\]"):
        load(changed(tied, tensors=wrong))


def test_an_index_decides_among_copies(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    stale = {name: tensor + 1 for name, tensor in tensors.items() if "q_proj" in name}
    unnamed = {"model.of_training.weight": torch.ones(3)}
    save_file(tensors, tmp_path / "a.safetensors")
    save_file(stale | unnamed | {"extra": torch.ones(1)}, tmp_path / "b.safetensors")
    _write_index(tmp_path, dict.fromkeys(tensors, "a.safetensors") | {"extra": "b.safetensors"})
    with pytest.raises(LoadError, match="no place: extra"):
        load(tmp_path)
    _write_index(
        tmp_path, {n: "b.safetensors" if n == "lm_head.weight" else "a.safetensors" for n in tensors}
    )
    save_file(stale | unnamed | {"lm_head.weight": tensors["lm_head.weight"]}, tmp_path / "b.safetensors")
    caplog.clear()
    loaded, expected = load(tmp_path), load(tiny_folder)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    (warning,) = caplog.messages
    for name in (*stale, *unnamed):
        assert f"{name} in b.safetensors" in warning


def test_a_missing_head_hints_at_tying(tiny_folder: Path, changed: Change) -> None:
    with pytest.raises(LoadError, match=r'lm_head\.weight; .*"tie_word_embeddings": true'):
        load(changed(tiny_folder, tensors={"lm_head.weight": None}))


def test_more_than_a_head_that_is_missing_is_no_matter_of_tying(tiny_folder: Path, changed: Change) -> None:
    with pytest.raises(LoadError) as caught:
        load(changed(tiny_folder, tensors={"lm_head.weight": None, "model.norm.weight": None}))
    assert "tie_word_embeddings" not in str(caught.value)


def _folder(path: Path) -> None:
    path.mkdir()


def _dangling(path: Path) -> None:
    path.symlink_to(path.parent / "blobs" / "0123")


def _pointer(path: Path) -> None:
    path.write_bytes(POINTER)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


KINDS = [
    (_folder, "is a folder; wanted a file"),
    (_dangling, r"is a link to .*0123, which does not exist"),
    (_pointer, r"pointer of git-lfs.*run `git lfs pull` in"),
    (_pipe, "is no regular file"),
]
FILES = ["model.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("make, message", KINDS, ids=lambda kind: getattr(kind, "__name__", ""))
def test_what_is_no_file_is_called_what_it_is(
    tiny_folder: Path, changed: Change, tmp_path: Path, name: str, make: Callable[[Path], None], message: str
) -> None:
    folder = changed(tiny_folder)
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises(LoadError, match=f"{name} {message}|{name} is a {message}"):
        _read_all(folder, Store(tmp_path / "store"))


@pytest.mark.parametrize("make, message", KINDS[1:], ids=lambda kind: getattr(kind, "__name__", ""))
def test_a_shard_or_gguf_that_is_no_file_is_called_what_it_is(
    tmp_path: Path, tiny_folder: Path, make: Callable[[Path], None], message: str
) -> None:
    make(tmp_path / "a.gguf")
    with pytest.raises(LoadError, match=f"a.gguf (is a )?{message}"):
        resolve_source(tmp_path / "a.gguf", store=Store(tmp_path / "store"))
    shutil.copy(tiny_folder / "config.json", tmp_path)
    _write_index(tmp_path, {"lm_head.weight": "a.safetensors"})
    make(tmp_path / "a.safetensors")
    with pytest.raises(LoadError, match=f"a.safetensors (is a )?{message}"):
        load(tmp_path)


def _read_all(folder: Path, store: Store) -> None:
    resolve_source(folder, store=store)
    read_generation_config(folder)
    load(folder)


SIZES = ["hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "head_dim"]


@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_its_tensors_do_not_have_is_refused_before_memory_is_spent(
    tiny_folder: Path, changed: Change, name: str
) -> None:
    folder = changed(tiny_folder)
    _set(folder, {name: HUGE - HUGE % 4, **({"num_key_value_heads": 2} if "heads" in name else {})})
    with pytest.raises(LoadError, match=r"has shape .*its config calls for"):
        Runtime.from_pretrained(folder, compile=False)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size"])
def test_invented_weights_beyond_memory_are_refused_by_name(
    tiny_folder: Path, changed: Change, name: str
) -> None:
    folder = changed(tiny_folder)
    _set(folder, {name: HUGE - HUGE % 4})
    with pytest.raises(
        ConfigError, match=f"GiB are available and the weights take.*{name} {HUGE - HUGE % 4}"
    ):
        Runtime.from_pretrained(folder, load_format="dummy", num_kv_blocks=4, compile=False)


def test_positions_beyond_memory_are_refused_by_name(tiny_folder: Path, changed: Change) -> None:
    folder = changed(tiny_folder)
    _set(folder, {"max_position_embeddings": HUGE})
    for settings in ({}, {"num_kv_blocks": 4}, {"max_model_len": 64}):
        with pytest.raises(ConfigError, match=rf"max_position_embeddings is {HUGE}.*GiB"):
            Runtime.from_pretrained(folder, compile=False, **settings)


@given(st.dictionaries(st.sampled_from([*SIZES, "num_key_value_heads"]), st.integers(1, HUGE), min_size=1))
def test_sizes_are_those_of_the_tensors_or_refused_by_name(tiny_folder: Path, sizes: dict[str, int]) -> None:
    """Nothing of such a size is ever made: what does not fit is an error of ours at once."""
    config = json.loads((tiny_folder / "config.json").read_text())
    try:
        model = ModelConfig.from_dict(config | sizes)
        read_checkpoint(_definition(model), model, tiny_folder)
    except (ConfigError, LoadError):
        return
    read = read_model_config(tiny_folder)
    assert dataclasses.replace(model, num_heads=read.num_heads, head_dim=read.head_dim) == read


def _definition(model: ModelConfig) -> Any:
    from lamina.models.registry import find_model

    return find_model(model.architecture)


def _set(folder: Path, values: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _write_index(folder: Path, placed: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
