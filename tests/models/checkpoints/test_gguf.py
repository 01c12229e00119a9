"""GGUF files against the checkpoints they were made from."""

import contextlib
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from lamina.common.contents import verify
from lamina.common.errors import LaminaError, LoadError, UnsupportedError
from lamina.common.store import Store
from lamina.custom_ops.linear_blocks.layout import KINDS
from lamina.models.checkpoints.gguf import convert_gguf
from lamina.models.checkpoints.gguf_config import LAYER_MODULES, MODULES, checkpoint_config
from lamina.models.checkpoints.gguf_file import GGUFContent, read_gguf
from lamina.models.config import read_model_config
from lamina.models.generation_config import read_generation_config
from lamina.models.quantization.blocks import STORES

Run = Callable[..., Tensor]
PROMPT = [1, 17, 300, 42, 42, 5, 199, 7]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KIND = gguf.GGMLQuantizationType
# Beside float32; K-quants, which the gguf package reads and does not write, are in test_gguf_families.py.
EVERY_KIND = (KIND.F16, KIND.BF16, KIND.Q4_0, KIND.Q4_1, KIND.Q5_0, KIND.Q5_1, KIND.Q8_0)


def write_gguf(
    path: Path,
    folder: Path,
    *,
    kind: KIND = KIND.F32,
    kinds: dict[str, KIND] | None = None,  # of single tensors
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    fields: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    architecture: str = "llama",
) -> Path:
    """What llama.cpp's own converter writes for a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    fields(writer)
    for name, values in {**dict(_llama_cpp_tensors(folder, config)), **(extra or {})}.items():
        quantized = (kinds or {}).get(name, kind) if values.ndim == 2 else KIND.F32
        writer.add_tensor(name, quantize(values, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantize(values: np.ndarray[Any, Any], kind: KIND) -> np.ndarray[Any, Any]:
    """Rows of blocks by the gguf package, of K-quants, which it does not write, by our own."""
    if not kind.name.endswith("_K"):
        return gguf.quantize(values, kind)
    rows = torch.empty(values.shape[0], KINDS[kind.name].row_bytes(values.shape[1]), dtype=torch.uint8)
    STORES[kind.name](torch.from_numpy(values), [rows])
    return rows.numpy()


def _llama_cpp_tensors(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    names = {target: source for source, target in MODULES.items()}
    layer_names = {target: source for source, target in LAYER_MODULES.items()}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, suffix = name.rpartition(".")
        values = tensor.numpy()
        if module in names:
            yield f"{names[module]}.{suffix}", values
            continue
        _, _, layer, rest = module.split(".", 3)
        target = layer_names[rest]
        if target in heads:
            halves = values.reshape(heads[target], 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        yield f"blk.{layer}.{target}.{suffix}", values


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_a_converted_file_computes_what_its_source_does(
    tiny_folder: Path, tmp_path: Path, store: Store, logits_of: Run
) -> None:
    folder = convert_gguf(write_gguf(tmp_path / "tiny.gguf", tiny_folder), store, dtype=torch.float32)
    assert torch.equal(logits_of(folder, PROMPT), logits_of(tiny_folder, PROMPT))


@pytest.mark.parametrize(
    "changes",
    [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 32}],
    ids=str,
)
def test_every_kind_of_checkpoint_survives_the_way_through_gguf(
    make_tiny_folder: Callable[..., Path],
    tmp_path: Path,
    store: Store,
    logits_of: Run,
    changes: dict[str, Any],
) -> None:
    source = make_tiny_folder(**changes)

    def key_length(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(changes.get("head_dim", 16))

    path = write_gguf(tmp_path / "tiny.gguf", source, fields=key_length)
    folder = convert_gguf(path, store, dtype=torch.float32)
    assert torch.equal(logits_of(folder, PROMPT), logits_of(source, PROMPT))


def test_the_config_is_that_of_the_source(tiny_folder: Path, tmp_path: Path, store: Store) -> None:
    folder = convert_gguf(write_gguf(tmp_path / "tiny.gguf", tiny_folder), store, dtype=torch.float32)
    assert read_model_config(folder) == read_model_config(tiny_folder)
    assert read_generation_config(folder).eos_token_ids == (2,)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_quantized_weights_are_what_the_gguf_package_makes_of_them(
    tiny_folder: Path, tmp_path: Path, store: Store, kind: KIND
) -> None:
    folder = convert_gguf(
        write_gguf(tmp_path / "tiny.gguf", tiny_folder, kind=kind), store, dtype=torch.float32
    )
    source, converted = load_file(tiny_folder / "model.safetensors"), load_file(folder / "model.safetensors")
    assert source.keys() == converted.keys()
    for name, tensor in source.items():
        values = tensor.numpy()
        expected = gguf.dequantize(gguf.quantize(values, kind), kind) if values.ndim == 2 else values
        assert torch.equal(converted[name], torch.from_numpy(expected).float()), name


def test_the_divisors_of_llama3_rope_give_back_its_parameters(
    make_tiny_folder: Callable[..., Path], tmp_path: Path, store: Store, logits_of: Run
) -> None:
    source = make_tiny_folder(rope_parameters=LLAMA3)
    divisors = _llama_cpp_rope_divisors(dim=16)
    path = write_gguf(tmp_path / "tiny.gguf", source, extra={"rope_freqs.weight": divisors})
    folder = convert_gguf(path, store, dtype=torch.float32)
    assert read_model_config(folder).rope == read_model_config(source).rope
    prompt = [(11 * i) % 317 + 3 for i in range(150)]
    assert torch.equal(logits_of(folder, prompt), logits_of(source, prompt))


def _llama_cpp_rope_divisors(dim: int) -> np.ndarray[Any, Any]:
    factor, low, high, original = 8.0, 1.0, 4.0, 64
    divisors = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * 10000.0 ** (i / dim)
        smooth = (original / wavelength - low) / (high - low)
        divisors.append(1 / ((1 - min(max(smooth, 0), 1)) / factor + min(max(smooth, 0), 1)))
    return np.array(divisors, dtype=np.float32)


def test_divisors_of_one_are_no_scaling(tiny_folder: Path, tmp_path: Path, store: Store) -> None:
    ones = {"rope_freqs.weight": np.ones(8, dtype=np.float32)}
    folder = convert_gguf(
        write_gguf(tmp_path / "a.gguf", tiny_folder, extra=ones), store, dtype=torch.float32
    )
    assert read_model_config(folder).rope.rope_type == "default"


def test_divisors_that_fit_no_scaling_are_refused(tiny_folder: Path, tmp_path: Path, store: Store) -> None:
    odd = {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}
    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder, extra=odd)
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight fits no llama3"):
        convert_gguf(path, store, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_is_read(tiny_folder: Path, tmp_path: Path, store: Store, kind: str) -> None:
    def scaling(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder, fields=scaling)
    rope = read_model_config(convert_gguf(path, store, dtype=torch.float32)).rope
    assert (rope.rope_type, rope.factor) == (kind, 4.0)


def test_a_file_is_converted_once_for_each_dtype(tiny_folder: Path, tmp_path: Path, store: Store) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder)
    first = convert_gguf(path, store, dtype=torch.float32)
    inode = (first / "model.safetensors").stat().st_ino
    moved = path.rename(tmp_path / "moved.gguf")
    assert convert_gguf(moved, store, dtype=torch.float32) == first
    assert (first / "model.safetensors").stat().st_ino == inode
    half = convert_gguf(moved, store, dtype=torch.bfloat16)
    assert half != first
    assert read_model_config(half).dtype == torch.bfloat16


def test_a_file_written_anew_is_converted_anew(
    make_tiny_folder: Callable[..., Path], tmp_path: Path, store: Store, logits_of: Run
) -> None:
    folders = []
    for source in (make_tiny_folder(seed=1), make_tiny_folder(seed=2)):
        path = write_gguf(tmp_path / "tiny.gguf", source)
        folders.append(convert_gguf(path, store, dtype=torch.float32))
        assert torch.equal(logits_of(folders[-1], PROMPT), logits_of(source, PROMPT))
    assert folders[0] != folders[1]


def test_a_failed_conversion_leaves_no_folder(tiny_folder: Path, tmp_path: Path, store: Store) -> None:
    extra = {"blk.0.attn_magic.weight": np.ones(8, dtype=np.float32)}
    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder, extra=extra)
    with pytest.raises(UnsupportedError, match=r"blk\.0\.attn_magic\.weight"):
        convert_gguf(path, store, dtype=torch.float32)
    assert not list((store.root / "folders").glob("*/*"))


def test_other_architectures_are_refused_by_name(
    tiny_folder: Path, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the header alone: to hash a file of tens of GiB takes minutes."""
    monkeypatch.setattr(GGUFContent, "digest", None)
    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder, architecture="bert")
    with pytest.raises(UnsupportedError, match="architecture 'bert'; of GGUF files, llama, qwen2"):
        convert_gguf(path, store, dtype=torch.float32)


def test_a_mixture_of_experts_is_refused(tiny_folder: Path, tmp_path: Path, store: Store) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder, fields=lambda writer: writer.add_expert_count(8))
    with pytest.raises(UnsupportedError, match="mixes 8 experts"):
        convert_gguf(path, store, dtype=torch.float32)


@pytest.mark.parametrize("kept", [0, 3, 10, 100, 1000, 5000, -1], ids=lambda kept: f"first {kept} bytes")
def test_a_file_cut_short_is_named(tiny_folder: Path, tmp_path: Path, kept: int) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(LoadError, match=r"tiny\.gguf is"):
        read_gguf(path)


@given(changes=st.dictionaries(st.integers(0, 1500), st.integers(0, 255), min_size=1, max_size=3))
def test_a_damaged_header_raises_our_errors_alone(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory, changes: dict[int, int]
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "tiny.gguf"
    content = bytearray(write_gguf(path, tiny_folder).read_bytes())
    for place, value in changes.items():
        content[place] = value
    path.write_bytes(content)
    with contextlib.suppress(LaminaError):
        checkpoint_config(read_gguf(path), torch.float32)


def reshaped(content: bytes, *columns_first: int, kind: int = 0) -> bytes:
    """The file with another shape and type of its embedding."""
    name = b"token_embd.weight"
    place = content.index(name) + len(name)
    entry = struct.pack("<IQQI", 2, *columns_first, kind)
    return content[:place] + entry + content[place + len(entry) :]


@pytest.mark.parametrize(
    "columns, rows, kind, message",
    [
        (64, 320, 99, "token_embd.weight in .* has GGML type 99"),
        (64, 320, int(KIND.I8), "GGML type I8: Dequantization for I8 is not"),
        (64, 320, int(KIND.Q2_K), r"token_embd.weight in .* is \[320, 64\]; wanted rows of 256 n"),
        (0, 320, 0, r"damaged: token_embd.weight is \[320, 0\], nothing at all"),
        (2**40, 2**40, 0, "cut short: token_embd.weight lies beyond its end"),
        (63, 320, 0, r"has shape \[320, 63\]; its config calls for \[320, 64\]"),
    ],
)
def test_a_tensor_that_cannot_be_read_is_named(
    tiny_folder: Path,
    tmp_path: Path,
    store: Store,
    logits_of: Run,
    columns: int,
    rows: int,
    kind: int,
    message: str,
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder)
    path.write_bytes(reshaped(path.read_bytes(), columns, rows, kind=kind))
    with pytest.raises((LoadError, UnsupportedError), match=message):
        logits_of(convert_gguf(path, store, dtype=torch.float32), PROMPT)


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"rope_freqs.weight": np.ones(3)}, "rope_freqs.weight has 3 numbers; wanted 8"),
        ({"rope_factors_long.weight": np.ones(8)}, "has one of rope_factors_short.weight and"),
        (
            {"blk.0.attn_q.weight": np.ones((63, 64))},
            r"q_proj.weight in .* has shape \[63, 64\]; .* \[64, 64\]",
        ),
    ],
    ids=str,
)
def test_a_tensor_that_does_not_fit_the_metadata_is_named(
    tiny_folder: Path, tmp_path: Path, store: Store, extra: dict[str, Any], message: str
) -> None:
    extra = {name: values.astype(np.float32) for name, values in extra.items()}
    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder, extra=extra)
    with pytest.raises((LoadError, UnsupportedError), match=message):
        convert_gguf(path, store, dtype=torch.float32)


def test_an_architecture_that_is_no_name_is_refused(tiny_folder: Path, tmp_path: Path, store: Store) -> None:
    def listed(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["general.architecture"]
        writer.add_array("general.architecture", ["llama"])

    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder, fields=listed)
    with pytest.raises(UnsupportedError, match=r"has architecture \['llama'\]; of GGUF files"):
        convert_gguf(path, store, dtype=torch.float32)


def test_a_tokenizer_that_cannot_be_read_is_named(tiny_folder: Path, tmp_path: Path, store: Store) -> None:
    def tokenizer(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_array("tokenizer.ggml.tokens", [1, 2, 3])

    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder, fields=tokenizer)
    with pytest.raises(LoadError, match=r"the tokenizer of .*tiny\.gguf cannot be read.* with --tokenizer"):
        convert_gguf(path, store, dtype=torch.float32)
    folder = convert_gguf(path, store, dtype=torch.float32, needs_tokenizer=False)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("config.json", "generation_config.json", "manifest.json", "model.safetensors"),
        "tokenizer_error.txt",
    ]
    assert verify(store) == []


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(LoadError, match="does not begin with GGUF"):
        read_gguf(path)


def test_the_tokenizer_comes_along(
    tiny_folder: Path, tmp_path: Path, store: Store, bbpe_tokenizer: Callable[[], Any]
) -> None:
    original = bbpe_tokenizer()
    model = json.loads(original.backend_tokenizer.to_str())["model"]

    def tokenizer(writer: gguf.GGUFWriter) -> None:
        control = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
        writer.add_token_types([control[i >= 4] for i in range(len(model["vocab"]))])
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
        writer.add_add_bos_token(True)
        writer.add_chat_template(original.chat_template)

    from transformers import AutoTokenizer

    path = write_gguf(tmp_path / "tiny.gguf", tiny_folder, fields=tokenizer)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "of another model"}')
    converted = AutoTokenizer.from_pretrained(convert_gguf(path, store, dtype=torch.float32))
    text = "hello world, the thé 東"
    expected = original.encode(text, add_special_tokens=False)
    assert converted.encode(text, add_special_tokens=False) == expected
    assert converted.encode(text) == original.encode(text) == [1, *expected]
    assert (converted.bos_token_id, converted.eos_token_id) == (1, 2)
    assert converted.chat_template == original.chat_template
