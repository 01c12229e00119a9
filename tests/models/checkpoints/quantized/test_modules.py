"""Which modules a checkpoint quantizes, by each dialect's rules, and models that mix them with dense ones."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina import LoadError, UnsupportedError
from lamina.models.checkpoints.quantized.configs import READERS, read_dialect
from lamina.models.checkpoints.quantized.dialect import Dialect
from lamina.models.checkpoints.quantized.formats import Format, int8_rows
from lamina.models.checkpoints.quantized.modules import own_schemes, quantized_modules
from lamina.models.checkpoints.weights import load_weights, read_checkpoint
from lamina.models.config import read_model_config
from lamina.models.fields import Fields
from lamina.models.registry import ParameterSpec, find_model

from ....families import FAMILIES
from . import writers
from .writers import PACKED, ct, weights_of

Q, K, V, OUT = (f"model.layers.0.self_attn.{name}_proj" for name in "qkvo")
GATE, UP, DOWN = (f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down"))
HEAD = "lm_head"
MODULES = (Q, K, V, OUT, GATE, UP, DOWN, HEAD)
PROMPT = [(37 * i) % 317 + 3 for i in range(24)]
Logits = Callable[..., Tensor]


def quantized(config: dict[str, Any], modules: Sequence[str] = MODULES) -> set[str]:
    dialect = READERS[config["quant_method"]](Fields(config, "config.json"))
    return {module for module in modules if dialect.format_of(module) is not None}


def groups(*targets_and_bits: tuple[list[str], int], ignore: Sequence[str] = ()) -> dict[str, Any]:
    """A config of compressed-tensors with a group for each, of so many bits."""
    own = {}
    for number, (targets, bits) in enumerate(targets_and_bits):
        weights = weights_of(bits, "int", "channel")
        own[f"group_{number}"] = {"targets": targets, "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": own,
        "ignore": list(ignore),
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
ALL, ATTENTION, MLP = set(MODULES), {Q, K, V, OUT}, {GATE, UP, DOWN}
LINEAR = ["Linear"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (groups((LINEAR, 4)), ALL),
        (groups((LINEAR, 4), ignore=[HEAD]), ALL - {HEAD}),
        (groups((LINEAR, 4), ignore=["re:.*self_attn.*", HEAD]), {GATE, UP, DOWN}),
        (groups((LINEAR, 4), ignore=["model.layers.0.self_attn.qkv_proj"]), ALL - {Q, K, V}),
        (groups((LINEAR, 4), ignore=["re:.*gate_up_proj"]), ALL - {GATE, UP}),
        (groups((["re:.*down_proj$"], 4)), {DOWN}),
        (groups(([OUT, "re:.*nothing"], 4)), {OUT}),
        (groups((LINEAR, 4), ignore=["model.layers.0"]), ALL),  # a name of no linear module
        (GPTQ, ALL - {HEAD}),
        (GPTQ | {"lm_head": True}, ALL),
        (GPTQ | {"dynamic": {r"-:.*\.mlp\.": {}}}, ATTENTION),
        (GPTQ | {"dynamic": {r"-:.*down": {}, r"+:.*": {"group_size": 64}}}, ALL - {DOWN}),
        (GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj"]]}, {Q, DOWN}),
        (AWQ, ALL - {HEAD}),
        (AWQ | {"modules_to_not_convert": ["mlp"]}, ATTENTION),
        ({"quant_method": "fp8"}, ALL - {HEAD}),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp", "o_proj"]}, {Q, K, V}),
        ({"quant_method": "fp8", "ignored_layers": [Q, K, V]}, {OUT, GATE, UP, DOWN}),
        (
            {"quant_method": "fbgemm_fp8", "modules_to_not_convert": [r"model\.layers\.0\.mlp"]},
            ATTENTION,
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*mlp*", HEAD]},
            ATTENTION,
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["model.layers.0.self_attn"]},
            ALL - ATTENTION,
        ),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, set()),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["o_proj"]},
            ALL - {HEAD, OUT},
        ),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),  # alike in every process
)
def test_exempt_modules(config: dict[str, Any], expected: set[str]) -> None:
    assert quantized(config) == expected


def test_of_mixed_groups_a_name_wins_over_an_expression_and_that_over_the_class() -> None:
    config = groups((LINEAR, 8), (["re:.*proj"], 4), (["re:.*down_proj"], 8), ([DOWN], 4))
    dialect = READERS["compressed-tensors"](Fields(config, "config.json"))
    names = {module: form.scheme.name for module in MODULES if (form := dialect.format_of(module))}
    assert names == {**dict.fromkeys(MODULES, "w4a16"), HEAD: "int8"}
    config = groups((["re:.*down"], 8), (["re:.*down_proj"], 4))
    form = READERS["compressed-tensors"](Fields(config, "config.json")).format_of(DOWN)
    assert form is not None
    assert form.scheme.name == "int8"  # the first in order


def specs_of_layer() -> dict[str, ParameterSpec]:
    def spec(*modules: str) -> ParameterSpec:
        sources = tuple(f"{module}.weight" for module in modules)
        return ParameterSpec(shape=(8 * len(modules), 16), sources=sources, projection=True)

    return {
        "qkv": spec(Q, K, V),
        "o": spec(OUT),
        "gate_up": spec(GATE, UP),
        "down": spec(DOWN),
        "head": spec(HEAD),
    }


@given(exempt=st.sets(st.sampled_from(MODULES)))
def test_parts_of_one_projection_are_exempt_together_or_refused_by_their_names(exempt: set[str]) -> None:
    specs, form = specs_of_layer(), int8_rows("test")

    def format_of(module: str) -> Format | None:
        return None if module in exempt else form

    dialect = Dialect(name="test", format_of=format_of)
    split = [fused for fused in ({Q, K, V}, {GATE, UP}) if fused & exempt and fused - exempt]
    if split:
        with pytest.raises(UnsupportedError, match=min(split[0])):
            quantized_modules(dialect, specs)
        return
    modules = quantized_modules(dialect, specs)
    assert {module.name for module in modules} == ALL - exempt
    schemes = own_schemes(dialect, modules, specs)
    table = schemes.parameter_table(torch.float32)
    for name, spec in specs.items():
        is_dense = all(source.removesuffix(".weight") in exempt for source in spec.sources)
        assert (name in schemes.schemes) is not is_dense
        assert table[name] == (spec.shape, torch.float32 if is_dense else torch.int8)
    starts = {module.name: module.start for module in modules}
    assert all(starts[name] == start for name, start in {K: 8, V: 16, UP: 8}.items() if name in starts)


def ignoring(ignore: list[str], dense: tuple[str, ...]) -> writers.Dialect:
    return writers.Dialect(
        config=PACKED.config | {"ignore": ignore}, write=PACKED.write, scheme="w4a16", dense=dense
    )


def test_a_model_may_mix_quantized_and_dense_projections(
    source: Path, tmp_path: Path, logits_of: Logits, reference_logits: Logits
) -> None:
    dense = ("lm_head", "down_proj", "layers.1.self_attn.o_proj")
    ignore = ["lm_head", "re:.*down_proj", "model.layers.1.self_attn.o_proj"]
    folder, meant = writers.save(tmp_path, source, ignoring(ignore, dense))
    expected = reference_logits(meant, PROMPT)
    torch.testing.assert_close(logits_of(folder, PROMPT), expected, rtol=1e-4, atol=1e-4)


def test_a_fused_module_of_the_file_itself_may_be_exempt(tmp_path: Path, logits_of: Logits) -> None:
    """Phi-3's qkv_proj is one tensor, and its name stands in the list."""
    source = FAMILIES["phi3"].save(tmp_path / "source", num_hidden_layers=1)
    dialect = ignoring(["lm_head", "model.layers.0.self_attn.qkv_proj"], ("lm_head", "qkv_proj"))
    folder, meant = writers.save(tmp_path, source, dialect)
    schemes = read(folder).schemes
    assert set(schemes.schemes) == {"layers.0.o", "layers.0.gate_up", "layers.0.down"}
    torch.testing.assert_close(logits_of(folder, PROMPT), logits_of(meant, PROMPT), rtol=1e-4, atol=1e-4)


def test_the_config_is_found_where_a_model_of_text_and_more_keeps_it(source: Path, tmp_path: Path) -> None:
    folder, _ = writers.save(tmp_path, source, PACKED)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    own = config.pop("quantization_config")
    path.write_text(json.dumps(config | {"text_config": {"quantization_config": own}}))
    assert read(folder).schemes.name == "compressed-tensors"
    path.write_text(json.dumps(config | {"compression_config": {"quantization_config": own}}))
    assert read(folder).schemes.name == "compressed-tensors"
    path.write_text(json.dumps(config))
    assert read_dialect(folder) is None
    with pytest.raises(LoadError, match="weight_packed"):
        read(folder)


def read(folder: Path) -> Any:
    config = read_model_config(folder)
    return read_checkpoint(find_model(config.architecture), config, folder)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_weights(read(folder), dtype=dtype, device="cpu")


def test_a_device_without_a_kernel_is_refused_with_what_helps(source: Path, tmp_path: Path) -> None:
    write = partial(writers.ct_int8, by_row=True)
    dialect = ct("int-quantized", weights_of(8, "int", "channel"), write, "int8")
    schemes = read(writers.save(tmp_path, source, dialect)[0]).schemes
    with pytest.raises(UnsupportedError, match=r"'int8', .* are for CPU and CUDAs, .* use device='cpu'"):
        schemes.check(torch.device("mps"))
