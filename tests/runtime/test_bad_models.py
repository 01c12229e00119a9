"""Folders that are no model, or a damaged one: the error names the file and the remedy."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lamina import ConfigError, LoadError, Runtime, SamplingParams, UnsupportedError

CUTS = [0, 0.5, 0.99]


@pytest.fixture
def folder(tiny_text_folder, tmp_path):
    """A copy to damage."""
    return shutil.copytree(tiny_text_folder, tmp_path / "model")


@pytest.fixture(autouse=True)
def _nothing_is_left_running():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def load(folder, **settings):
    return Runtime.from_pretrained(folder, **{"compile": False} | settings)


def refused(folder, error, message):
    with pytest.raises(error, match=message) as raised:
        load(folder)
    return str(raised.value)


def test_a_folder_that_is_missing(tmp_path):
    refused(
        tmp_path / "none", LoadError, "none' does not exist; wanted a model folder, a .gguf file or a hub"
    )


def test_a_folder_that_is_no_model(tmp_path):
    refused(tmp_path, LoadError, r"is no model folder: it has no config\.json; download")


def test_a_file_that_is_no_model(folder):
    refused(folder / "config.json", LoadError, r"config\.json is a file; wanted a model folder")


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
)
def test_a_file_that_was_cut_short(folder, name, cut):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(len(data) * cut)])
    message = refused(folder, LoadError, name.replace(".", r"\."))
    assert "download it again" in message


@pytest.mark.parametrize("content", [b"[1]", b"\xff\xfe\x00", b"null"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_file_with_something_else_in_it(folder, name, content):
    (folder / name).write_bytes(content)
    assert "download it again" in refused(folder, LoadError, name.replace(".", r"\."))


def _link_to_nowhere(path):
    path.symlink_to(path.with_name("not-fetched"))


def _no_text(path):
    path.write_bytes(b"\xff\xfe{{ messages }}")


@pytest.mark.parametrize("damage", [_link_to_nowhere, os.mkfifo, Path.mkdir, _no_text])
@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
def test_a_chat_template_that_cannot_be_read_is_not_passed_over(folder, name, damage):
    """As a download that broke off leaves it: chats would go by another template, or by none."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    damage(path)
    refused(folder, LoadError, name.replace(".", r"\."))


@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            UnsupportedError,
            "'GPT2LMHeadModel' is not known; known are",
        ),
        ({"hidden_size": "x"}, ConfigError, "hidden_size is 'x'; wanted an integer"),
        ({"hidden_size": 0}, ConfigError, "hidden_size is 0; wanted"),
        ({"hidden_size": None}, ConfigError, "hidden_size is missing"),
        ({"num_key_value_heads": 3}, ConfigError, "num_key_value_heads is 3; wanted a divisor"),
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act is 'gelu'; supported are 'silu' and"),
        ({"quantization_config": {"bits": 4}}, UnsupportedError, "quantization_config"),
        ({"dtype": "int8"}, ConfigError, "dtype is 'int8'; wanted one of"),
        ({"eos_token_id": "x"}, ConfigError, "eos_token_id is 'x'; wanted a token id"),
        (
            {"num_hidden_layers": 3},
            LoadError,
            r"lacks tensors that its config calls for: model\.layers\.2\.",
        ),
        (
            {"num_hidden_layers": 1},
            LoadError,
            r"tensors that its config gives no place: model\.layers\.1\.",
        ),
        ({"vocab_size": 100}, LoadError, r"has shape \[320, 64\]; its config calls for \[100, 64\]"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit(folder, change, error, message):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(folder, error, message)


def test_a_shard_that_is_missing_is_named_as_an_incomplete_download(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {f"model-0000{i}-of-00003.safetensors": names[i - 1 :: 3] for i in (1, 2, 3)}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / shard)
    placed = {name: shard for shard, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    load(folder).close()
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, LoadError, r"incomplete download: model-00002-of-00003\.safetensors")


def test_a_damaged_file_is_reported_before_anything_is_compiled(folder, tmp_path):
    (folder / "model.safetensors").write_bytes(b"")
    cache = tmp_path / "cache"
    with pytest.raises(LoadError, match=r"model\.safetensors is damaged or cut short.*download it again"):
        load(folder, compile=True, cache_dir=cache)
    assert not list(cache.glob("refs/pieces/*"))
    assert not list(cache.glob("temporary/*"))


def test_a_model_that_failed_to_load_does_not_spoil_the_next(folder, tiny_text_folder):
    (folder / "model.safetensors").write_bytes(b"")
    refused(folder, LoadError, "damaged")
    with load(tiny_text_folder) as runtime:
        assert len(runtime.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True))) == 1
