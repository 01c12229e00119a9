"""A scheme from outside Lamina, with another layout of scales than int8 has: served, sized and told of."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from lamina import ConfigError, LoadError, Runtime, SamplingParams, UnsupportedError
from lamina.common.progress import say_nothing
from lamina.models import ParameterSpec
from lamina.models.config import read_model_config
from lamina.models.quantization import scheme as schemes
from lamina.models.quantization.model_schemes import uniform
from lamina.models.quantization.scheme import (
    Parts,
    QuantScheme,
    Shape,
    find_scheme,
    register_scheme,
    restore_one,
    store_one,
)
from lamina.models.registry import find_model
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.startup.loader import missing
from lamina.runtime.verify import verify

COLUMNS = 32  # of a row, with a scale and a least weight of their own
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [[5], [1, 2, 3], list(range(40, 70)), [300, 3] * 20]


def tensors(shape: Shape, dtype: torch.dtype) -> Mapping[str, tuple[Shape, torch.dtype]]:
    rows, columns = shape
    if columns % COLUMNS:
        raise UnsupportedError(f"quantization is 'nibbles', which cannot keep {shape}")
    groups = (rows, columns // COLUMNS)
    return {
        "": ((rows, columns // 2), torch.uint8),
        "scale": (groups, torch.float32),
        "least": (groups, dtype),
    }


def store(rows: Tensor, parts: Parts) -> None:
    packed, scale, least = parts
    groups = rows.unflatten(1, (-1, COLUMNS))
    least.copy_(groups.amin(dim=2))
    spread = groups.amax(dim=2) - least
    if not bool(spread.isfinite().all()):
        raise LoadError("holds weights that no nibble stands for")
    scale.copy_(spread.clamp(min=1e-9) / 15)
    steps = ((groups - least[:, :, None]) / scale[:, :, None]).round().clamp(0, 15).flatten(1)
    packed.copy_(steps[:, ::2] + 16 * steps[:, 1::2])


def restore(parts: Parts) -> Tensor:
    packed, scale, least = parts
    steps = torch.stack((packed % 16, packed // 16), dim=2).flatten(1).unflatten(1, (-1, COLUMNS))
    return (steps * scale[:, :, None] + least.float()[:, :, None]).flatten(1)


def multiply(x: Tensor, parts: Parts, bias: Tensor | None) -> Tensor:
    return F.linear(x, restore(parts).to(x.dtype), bias)


NIBBLES = QuantScheme(
    name="nibbles",
    kept="in half a byte a weight",
    devices=frozenset({"cpu", "cuda"}),
    tensors=tensors,
    store=store,
    restore=restore,
    multiply=multiply,
)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes, "_schemes", dict(schemes._schemes))
    register_scheme(NIBBLES)


@pytest.fixture(params=[False, True], ids=["a head of its own", "a tied head"])
def folder(request: pytest.FixtureRequest, make_tiny_folder: Callable[..., Path]) -> Path:
    return make_tiny_folder(tie_word_embeddings=request.param, attention_bias=True)


def dense_copy(folder: Path, copy: Path) -> Path:
    """A checkpoint of what the parts stand for, with a head of its own, as a tied one has its own parts."""
    held = load_file(folder / "model.safetensors")
    held.setdefault("lm_head.weight", held["model.embed_tokens.weight"].clone())
    for name, tensor in held.items():
        if tensor.dim() == 2 and "embed" not in name:
            parts = new_parts(NIBBLES, tuple(tensor.shape))
            store(tensor, parts)
            held[name] = restore(parts)
    save_file(held, copy / "model.safetensors")
    config = (folder / "config.json").read_text()
    (copy / "config.json").write_text(config.replace('embeddings": true', 'embeddings": false'))
    return copy


def new_parts(scheme: QuantScheme, shape: Shape) -> list[Tensor]:
    return [torch.empty(own, dtype=dtype) for own, dtype in scheme.tensors(shape, torch.float32).values()]


def answers(folder: Path, **settings: Any) -> list[tuple[int, ...]]:
    """Of all prompts together, then of each alone."""
    with Runtime.from_pretrained(folder, dtype="float32", num_kv_blocks=64, **settings) as runtime:
        together = [output.outputs[0].token_ids for output in runtime.generate(PROMPTS, GREEDY)]
        alone = [runtime.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]
    return [tuple(ids) for ids in (*together, *alone)]


@pytest.mark.parametrize(
    "compile", [False, pytest.param(True, marks=pytest.mark.long)], ids=["eager", "compiled"]
)
def test_a_model_answers_as_its_dense_copy_does(
    folder: Path, tmp_path: Path, compile_cache: Path, compile: bool
) -> None:
    expected = answers(dense_copy(folder, tmp_path), compile=False)
    assert answers(folder, quantization="nibbles", compile=compile, cache_dir=compile_cache) == expected
    assert expected != answers(folder, compile=False)


def test_it_is_told_of_in_statistics_in_words_and_in_bytes(tiny_folder: Path) -> None:
    settings: dict[str, Any] = {"quantization": "nibbles", "dtype": "float32", "compile": False}
    with Runtime.from_pretrained(tiny_folder, num_kv_blocks=64, **settings) as runtime:
        told, explained = runtime.stats()["quantization"], runtime.explain()
    assert told["name"] == "nibbles"
    assert 0.01 < told["total"]["relative_rms"] < 0.1
    assert "quantization nibbles: 9 projections in half a byte a weight, off by" in explained
    model = read_model_config(tiny_folder)
    specs = find_model(model.architecture).parameters(model)
    dense = sum(4 * torch.Size(spec.shape).numel() for spec in specs.values() if not spec.projection)
    assert uniform(NIBBLES, specs).num_bytes(torch.float32) == told["bytes"] + dense


def test_serving_with_it_is_warm_once_it_was_served_and_not_before(
    tiny_folder: Path, tmp_path: Path, compile_cache: Path
) -> None:
    def lacks(cache_dir: Path) -> tuple[str, ...]:
        return missing(RuntimeConfig(**settings, cache_dir=cache_dir), say_nothing).missing

    settings: dict[str, Any] = {"model": tiny_folder, "quantization": "nibbles", "dtype": "float32"}
    with Runtime(RuntimeConfig(**settings, cache_dir=compile_cache)) as runtime:
        runtime.warm_up()
    assert lacks(compile_cache) == ()
    assert lacks(tmp_path) != ()


def test_verify_finds_its_compiled_code_right(tiny_folder: Path, compile_cache: Path) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "cache_dir": compile_cache}
    config = RuntimeConfig(model=tiny_folder, quantization="nibbles", **settings)
    found = verify(config, [PROMPTS[2]], 2, say_nothing)
    assert found.is_right


def test_what_it_cannot_keep_is_refused_with_its_own_words(
    make_tiny_folder: Callable[..., Path], tiny_folder: Path, changed: Callable[..., Path]
) -> None:
    odd = make_tiny_folder(intermediate_size=72)
    with pytest.raises(UnsupportedError, match=r"'nibbles', which cannot keep \(64, 72\)"):
        Runtime.from_pretrained(odd, quantization="nibbles", compile=False)
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = load_file(tiny_folder / "model.safetensors")[name]
    tensor[5, 7] = torch.nan
    broken = changed(tiny_folder, tensors={name: tensor})
    with pytest.raises(LoadError, match=r"layers\.1\.gate_up holds weights that no nibble stands for"):
        Runtime.from_pretrained(broken, quantization="nibbles", compile=False)


def test_names_are_one_schemes_and_unknown_ones_are_told_the_others() -> None:
    register_scheme(NIBBLES)
    assert find_scheme("nibbles") is NIBBLES
    other = QuantScheme(name="int8", kept="", devices=frozenset({"cpu"}), tensors=tensors)
    with pytest.raises(ConfigError, match="quantization 'int8' is already registered"):
        register_scheme(other)
    for name in ("int4", 8, ["int8"], True):
        with pytest.raises(ConfigError, match=r"quantization is .*; wanted None or .*int8 or .*nibbles"):
            RuntimeConfig(model="folder", quantization=name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ({}, '"" first'),
        ({"scale": ((4,), torch.float32), "": ((4, 8), torch.int8)}, '"" first'),
        ({"": ((8, 4), torch.int8)}, "as many rows in each"),
        ({"": ((4, 8), torch.int8), "scale": ((), torch.float32)}, "as many rows in each"),
    ],
)
def test_parts_without_a_row_for_each_row_are_refused(parts: Any, wanted: str) -> None:
    specs = {"w": ParameterSpec(shape=(4, 8), sources=("w",), projection=True)}
    odd = replace(NIBBLES, tensors=lambda shape, dtype: parts)
    with pytest.raises(ConfigError, match=rf"'nibbles' keeps \(4, 8\) as .*; wanted .*{wanted}"):
        uniform(odd, specs).check(torch.device("cpu"))


def test_what_is_not_as_ops_linear_takes_it_needs_a_multiply() -> None:
    specs = {"w": ParameterSpec(shape=(4, 32), sources=("w",), projection=True)}
    with pytest.raises(ConfigError, match=r'wanted "" alone, .* as there is no multiply'):
        uniform(replace(NIBBLES, multiply=None, store=store_one, restore=restore_one), specs)


@pytest.mark.parametrize("name", [None, "int8", "fp8", "fp8_block", "w4a16", "nibbles"])
def test_every_scheme_multiplies_by_what_it_restores(name: str | None) -> None:
    scheme = find_scheme(name)
    rows, x = torch.randn(12, 64), 448.0 * 0.5 ** torch.randint(0, 6, (5, 64))  # exact in float8 too
    x[:, 0] = 448.0
    parts = new_parts(scheme, (12, 64))
    for first in (6, 0):
        scheme.store(rows[first : first + 6], [part.narrow(0, first, 6) for part in parts])
    restored = scheme.restore(parts)
    assert restored.dtype == torch.float32
    assert (restored - rows).square().mean().sqrt() < 0.15
    multiply = scheme.multiply or (lambda x, parts, bias: F.linear(x, parts[0], bias))
    bias = torch.randn(12)
    torch.testing.assert_close(multiply(x, parts, bias), x @ restored.T + bias, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("own", [{"store": store}, {"restore": restore}])
def test_a_scheme_whose_store_nothing_would_call_is_refused(own: dict[str, Any]) -> None:
    scheme = replace(find_scheme(None), name="grid", **own)
    specs = {"weight": ParameterSpec(shape=(4, 32), sources=("weight",), projection=True)}
    with pytest.raises(ConfigError, match="no multiply"):
        uniform(scheme, specs)
    uniform(find_scheme(None), specs).check(torch.device("cpu"))
