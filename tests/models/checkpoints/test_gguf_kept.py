"""What a GGUF file is converted to: whole, of that file and no other, else made again, or an error."""

import errno
import json
import logging
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from lamina.common.contents import verify
from lamina.common.errors import LoadError, StoreError
from lamina.common.store import Store
from lamina.models.checkpoints import gguf as converter
from lamina.models.checkpoints.gguf import convert_gguf
from lamina.models.checkpoints.gguf_file import read_gguf
from lamina.runtime.runtime import Runtime
from lamina.runtime.sampling_params import SamplingParams

from .test_gguf import write_gguf


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store")


def kept(store: Store) -> list[Path]:
    """The converted folders that there are."""
    return list((store.root / "folders").glob("*/*"))


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_flipped_bit_is_found_by_verify_and_the_next_conversion_heals_it(
    tiny_folder: Path, tmp_path: Path, store: Store, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder)
    folder = convert_gguf(path, store, dtype=torch.float32)
    whole = (folder / file).read_bytes()
    damaged = bytearray(whole)
    damaged[-100] ^= 1
    (folder / file).write_bytes(damaged)
    assert [problem.what for problem in verify(store)] == [f"{file} is not what was written"]
    with caplog.at_level(logging.WARNING):
        assert convert_gguf(path, Store(store.root), dtype=torch.float32) == folder
    assert f"{file} is not what was written; it will be made again" in caplog.text
    assert (folder / file).read_bytes() == whole
    assert verify(store) == []


@pytest.mark.parametrize("how", ["renamed over it", "written over it", "cut short", "changed and back"])
def test_a_file_replaced_while_it_is_converted_leaves_nothing_wrong(
    make_tiny_folder: Callable[..., Path],
    tmp_path: Path,
    store: Store,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", make_tiny_folder(seed=1))
    other = write_gguf(tmp_path / "other.gguf", make_tiny_folder(seed=2))
    first, write = path.read_bytes(), converter._write_configs
    expected = (
        convert_gguf(path, Store(tmp_path / "a"), dtype=torch.float32) / "model.safetensors"
    ).read_bytes()
    wanted = (
        convert_gguf(other, Store(tmp_path / "b"), dtype=torch.float32) / "model.safetensors"
    ).read_bytes()

    def replaced(*arguments: object) -> None:
        write(*arguments)  # type: ignore[arg-type]
        if how == "renamed over it":
            shutil.copy(other, tmp_path / "copy")
            os.replace(tmp_path / "copy", path)
        elif how == "cut short":
            path.write_bytes(first[: len(first) // 2])
        else:
            path.write_bytes(other.read_bytes())
        if how == "changed and back":
            path.write_bytes(first)

    monkeypatch.setattr(converter, "_write_configs", replaced)
    if how == "renamed over it":  # what was opened is what is kept
        folder = convert_gguf(path, store, dtype=torch.float32)
        assert (folder / "model.safetensors").read_bytes() == expected
    else:
        with pytest.raises(LoadError, match=r"while it was read.*start again once it is whole"):
            convert_gguf(path, store, dtype=torch.float32)
        assert kept(store) == []
        path.write_bytes(other.read_bytes())
    monkeypatch.undo()
    folder = convert_gguf(path, store, dtype=torch.float32)
    assert (folder / "model.safetensors").read_bytes() == wanted


def test_a_disk_that_fills_while_converting_is_one_error_and_leaves_nothing(
    tiny_folder: Path, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(converter, "_write_weights", full)
    with pytest.raises(StoreError, match=r"cannot be written: .*No space left on device; make room"):
        convert_gguf(path, store, dtype=torch.float32)
    assert kept(store) == []
    assert list((store.root / "temporary").iterdir()) == []
    monkeypatch.undo()
    assert convert_gguf(path, store, dtype=torch.float32).exists()


def overlapping(content: bytes, name: bytes, offset: int) -> bytes:
    """The file with another place of a tensor of two dimensions."""
    place = content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 16 + 4
    return content[:place] + struct.pack("<Q", offset) + content[place + 8 :]


def test_tensors_that_lie_over_each_other_are_refused_before_anything_is_written(
    tiny_folder: Path, tmp_path: Path, store: Store
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder)
    tensors = read_gguf(path).tensors
    start = min(tensor.start for tensor in tensors.values())
    for offset in (tensors["output.weight"].start - start, tensors["output.weight"].start - start + 32):
        content = overlapping(path.read_bytes(), b"token_embd.weight", offset)
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(LoadError, match=r"output\.weight .*lie over each other|cut short"):
            convert_gguf(tmp_path / "bad.gguf", store, dtype=torch.float32)
    assert not (store.root / "folders").exists() or kept(store) == []


def test_a_name_that_is_there_twice_is_refused(tiny_folder: Path, tmp_path: Path, store: Store) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder)
    content = path.read_bytes().replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight")
    path.write_bytes(content)
    with pytest.raises(LoadError, match=r"blk\.0\.attn_q\.weight' is there twice"):
        convert_gguf(path, store, dtype=torch.float32)


def test_the_record_of_another_file_is_not_believed(
    make_tiny_folder: Callable[..., Path], tmp_path: Path, store: Store
) -> None:
    first = write_gguf(tmp_path / "first.gguf", make_tiny_folder(seed=1))
    second = write_gguf(tmp_path / "second.gguf", make_tiny_folder(seed=2))
    folders = [convert_gguf(path, store, dtype=torch.float32) for path in (first, second)]
    memos = sorted((store.root / "refs" / "gguf").iterdir())
    content = [memo.read_bytes() for memo in memos]
    for memo, other in zip(memos, reversed(content), strict=True):
        memo.write_bytes(other)
    assert [convert_gguf(path, store, dtype=torch.float32) for path in (first, second)] == folders
    one, other = folders
    shutil.rmtree(one)
    shutil.copytree(other, one)
    assert convert_gguf(first, store, dtype=torch.float32) == one
    assert json.loads((one / "manifest.json").read_text())["of"].endswith(one.name)


def test_a_given_tokenizer_serves_a_file_whose_own_cannot_be_read(
    tiny_folder: Path, tmp_path: Path, bbpe_tokenizer: Callable[[], Any]
) -> None:
    def unreadable(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_array("tokenizer.ggml.tokens", ["a", "b", "a"])

    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder, fields=unreadable)
    settings: dict[str, Any] = {"cache_dir": tmp_path / "store", "compile": False, "dtype": "float32"}
    settings |= {"device": "cpu", "num_kv_blocks": 16}
    for _ in range(2):  # before the weights are converted, and after
        with pytest.raises(LoadError, match=r"has 'a' twice; .*with --tokenizer, in Python tokenizer="):
            Runtime.from_pretrained(path, **settings)
        with Runtime.from_pretrained(path, tokenizer=bbpe_tokenizer(), **settings) as runtime:
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            (text,) = runtime.generate("hello", params)
            assert list(text.prompt_token_ids) == bbpe_tokenizer().encode("hello")
            params = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False)
            (ids,) = runtime.generate([[1, 5, 7]], params)
            assert len(ids.outputs[0].token_ids) == 3
