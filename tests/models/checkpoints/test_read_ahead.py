"""Tensors read ahead by threads: bit for bit those of plain loading, whatever the sizes; none is left."""

import os
import threading
import time
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
from lamina.models.checkpoints.loaded_weights import LoadedWeights
from lamina.models.checkpoints.read_ahead import Extent, ReadAhead
from lamina.models.checkpoints.shards import opened, tensor_headers
from lamina.models.checkpoints.tensor_parts import Part, cut, extents
from lamina.models.checkpoints.weights import load_weights, read_checkpoint
from lamina.models.config import read_model_config
from lamina.models.quantization.model_schemes import uniform
from lamina.models.quantization.scheme import find_scheme
from lamina.models.registry import find_model
from lamina.models.sharding import Run, sharding_of

from ...families import FAMILIES

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def small(buffer_bytes: int = 1024) -> ReadAhead:
    """Every tensor of a small model in pieces, through buffers that are used again and again."""
    return ReadAhead(CPU, num_threads=3, num_buffers=4, buffer_bytes=buffer_bytes)


def num_threads() -> int:
    return sum(thread.name.startswith("lamina-read-ahead") for thread in threading.enumerate())


def bits(tensor: Tensor) -> list[int]:
    return list(tensor.contiguous().view(torch.uint8).flatten().tolist())


@st.composite
def parts(draw: st.DrawFn) -> list[tuple[Tensor, Part]]:
    """Tensors with any bits, and the rows of each that are wanted."""
    found = []
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        size = (*shape[:-1], shape[-1] * dtype.itemsize)
        content = torch.randint(0, 256, size, dtype=torch.uint8).view(dtype).view(shape)
        start = draw(st.integers(0, shape[0] - 1))
        run = Run(start, draw(st.integers(0, shape[0] - start)), draw(st.integers(0, 9)))
        found.append((content, Part(f"{number}", run)))
    return found


@given(wanted=parts(), num_threads=st.integers(1, 4), num_buffers=st.integers(1, 4), room=st.integers(8, 400))
def test_any_rows_are_read_bit_for_bit_and_in_order(
    wanted: list[tuple[Tensor, Part]],
    num_threads: int,
    num_buffers: int,
    room: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("file")
    path = folder / "model.safetensors"
    save_file({part.name: tensor for tensor, part in wanted}, path)
    headers = tensor_headers(folder)[path]
    by_part = [cut(part, headers[part.name], room) for _, part in wanted]
    pieces = [piece for some in by_part for piece in some]
    reader = ReadAhead(CPU, num_threads=num_threads, num_buffers=num_buffers, buffer_bytes=room)
    read = list(reader.tensors(path, extents(path, pieces, headers)))
    assert len(read) == len(pieces)
    assert all(tensor.nbytes <= room for tensor in read)
    for (tensor, part), some in zip(wanted, by_part, strict=True):
        run = part.run
        assert run is not None
        if not some:
            assert tensor[0].nbytes > room
            continue
        own = [next(each for piece, each in zip(pieces, read, strict=True) if piece is one) for one in some]
        assert bits(torch.cat(own)) == bits(tensor[run.start : run.start + run.num_rows])
        assert [piece.is_last for piece in some] == [False] * (len(some) - 1) + [True]
        places = [piece.run.to for piece in some if piece.run]
        assert places == [run.to + sum(map(len, own[:number])) for number in range(len(own))]


def loaded(
    folder: Path,
    read_ahead: ReadAhead | None,
    *,
    dtype: torch.dtype = torch.float32,
    scheme: str | None = None,
    ranks: int = 1,
    rank: int = 0,
    **more: Any,
) -> LoadedWeights:
    config = read_model_config(folder)
    definition = find_model(config.architecture)
    checkpoint = read_checkpoint(definition, config, folder)
    schemes = uniform(find_scheme(scheme), checkpoint.specs)
    if ranks > 1:
        schemes = schemes.of_rank(sharding_of(definition, config, ranks))
    into: dict[str, Any] = {"dtype": dtype, "device": CPU, "rank": rank, **more}
    return load_weights(checkpoint, schemes=schemes, read_ahead=read_ahead, **into)


def check_same(one: LoadedWeights, other: LoadedWeights) -> None:
    assert one.by_name.keys() == other.by_name.keys()
    assert all(torch.equal(one.by_name[name], other.by_name[name]) for name in one.by_name)


@pytest.mark.parametrize("buffer_bytes", [8, 700, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_what_plain_loading_makes_of_it(
    make_tiny_folder: Callable[..., Path], buffer_bytes: int, dtype: torch.dtype
) -> None:
    folder = make_tiny_folder(tie_word_embeddings=True, attention_bias=True)
    check_same(loaded(folder, small(buffer_bytes), dtype=dtype), loaded(folder, None, dtype=dtype))


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_every_rank_has_its_part(tmp_path: Path, scheme: str | None) -> None:
    folder = FAMILIES["granite"].save(tmp_path, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    for rank in range(4):
        into: dict[str, Any] = {"ranks": 4, "rank": rank, "scheme": scheme}
        check_same(loaded(folder, small(), **into), loaded(folder, None, **into))


def test_a_tied_projection_with_a_scheme_is_given_the_embeddings_rows(
    make_tiny_folder: Callable[..., Path],
) -> None:
    folder = make_tiny_folder(tie_word_embeddings=True)
    check_same(loaded(folder, small(), scheme="int8"), loaded(folder, None, scheme="int8"))


def test_progress_counts_tensors_and_not_their_pieces(tiny_folder: Path) -> None:
    seen: list[float] = []
    loaded(tiny_folder, small(), progress=lambda stage, fraction, detail: seen.append(fraction))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_whatever_ends_a_load_leaves_no_thread_and_it_can_be_begun_again(
    tiny_folder: Path, failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, calls, read = small(), [], os.preadv

    def read_slowly(*where: Any) -> int:  # so that threads are at it when the load ends
        time.sleep(0.02)
        return read(*where)

    def fail(*said: object) -> None:
        calls.append(said)
        if len(calls) == 20:
            assert num_threads() > 0
            raise failure("enough")

    weights = loaded(tiny_folder, None)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", read_slowly)
        with pytest.raises(failure, match="enough") as caught:
            loaded(tiny_folder, reader, into=weights, progress=fail)
        assert num_threads() == 0
    assert caught.tb is not None  # whose frames were not dropped before
    for tensor in {*weights.by_name.values()}:
        tensor.zero_()
    check_same(loaded(tiny_folder, reader, into=weights), loaded(tiny_folder, None))


def after_opening(folder: Path, change: Callable[[Path], object]) -> Callable[[], object]:
    """Loads a checkpoint whose file was changed once its headers were read."""
    config = read_model_config(folder)
    checkpoint = read_checkpoint(find_model(config.architecture), config, folder)
    change(folder / "model.safetensors")
    return lambda: load_weights(checkpoint, dtype=torch.float32, device=CPU, read_ahead=small())


@pytest.mark.parametrize("kept", [0, 4, 100, -1], ids=lambda kept: f"first {kept} bytes")
def test_a_file_cut_short_is_named(tiny_folder: Path, changed: Callable[..., Path], kept: int) -> None:
    load = after_opening(changed(tiny_folder), lambda path: path.write_bytes(path.read_bytes()[:kept]))
    with pytest.raises(LoadError, match=r"model\.safetensors is damaged or cut short"):
        load()
    assert num_threads() == 0


def test_a_file_that_is_gone_is_named(tiny_folder: Path, changed: Callable[..., Path]) -> None:
    with pytest.raises(LoadError, match=r"model\.safetensors does not exist"):
        after_opening(changed(tiny_folder), Path.unlink)()


@pytest.mark.parametrize(
    "other", [torch.zeros(63), torch.zeros(64, dtype=torch.float16), None], ids=["shape", "dtype", "absent"]
)
def test_a_file_that_was_replaced_is_named(
    tiny_folder: Path, changed: Callable[..., Path], other: Tensor | None
) -> None:
    def replace(path: Path) -> None:
        held: dict[str, Any] = load_file(path) | {"model.norm.weight": other}
        save_file({name: tensor for name, tensor in held.items() if tensor is not None}, path)

    with pytest.raises(LoadError, match=r"has changed: model\.norm\.weight is .*; wanted \[64\] of F32"):
        after_opening(changed(tiny_folder), replace)()


def test_a_file_that_ends_while_it_is_read_is_damaged(tiny_folder: Path) -> None:
    path = tiny_folder / "model.safetensors"
    size = path.stat().st_size
    with opened(path):
        reads = small().tensors(path, [Extent(place, (64,), torch.float32) for place in (0, size - 8)])
        assert next(reads).shape == (64,)
        with pytest.raises(LoadError, match="cut short: it ends 248 bytes before a tensor does"):
            next(reads)
    assert num_threads() == 0
