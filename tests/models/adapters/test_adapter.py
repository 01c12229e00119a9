"""Adapters as PEFT writes them, read for a model: what each adds, and what is refused by its name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamina.common.errors import ConfigError, LaminaError, LoadError, UnsupportedError
from lamina.models.adapters.adapter import WEIGHTS_NAME, Adapter, read_adapter
from lamina.models.adapters.peft_config import CONFIG_NAME, read_peft_config
from lamina.models.checkpoints.weights import load_weights, read_checkpoint
from lamina.models.config import read_model_config
from lamina.models.quantization.model_schemes import ModelSchemes
from lamina.models.registry import find_model

from ...adapters import ALL_MODULES, write_adapter, write_merged

CONFIGS: dict[str, dict[str, Any]] = {
    "all modules": {},
    "query and value": {"target_modules": ["q_proj", "v_proj"], "r": 3},
    "without k": {"target_modules": ["q_proj", "v_proj", "gate_proj"]},
    "one of gate and up": {"target_modules": ["up_proj", "o_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "a pattern": {"target_modules": r".*\.layers\.1\.(self_attn\.[qk]_proj|mlp\.down_proj)"},
    "rank-stabilized": {"use_rslora": True, "lora_alpha": 5},
    "patterns of rank and alpha": {
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 7, "self_attn.o_proj": 1},
        "alpha_pattern": {"q_proj": 3, r"layers\.0\..*_proj": 11, "up_proj": 5},
    },
    "one layer": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "one layer, by itself": {"layers_to_transform": 0},
    "but for some": {"exclude_modules": ["k_proj", "model.layers.0.mlp.up_proj"]},
}


def specs_of(folder: Path):
    model = read_model_config(folder)
    return find_model(model.architecture).parameters(model)


def read(folder: Path, model: Path, max_rank: int = 8, dtype: torch.dtype = torch.float32) -> Adapter:
    return read_adapter(folder, specs_of(model), max_rank=max_rank, dtype=dtype)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    model = read_model_config(folder)
    definition = find_model(model.architecture)
    schemes = ModelSchemes(specs=definition.parameters(model))
    checkpoint = read_checkpoint(definition, model, folder)
    return load_weights(checkpoint, schemes=schemes, dtype=torch.float32, device="cpu").by_name


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_weights_and_what_it_adds_are_those_that_peft_merges(
    config: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tiny_folder, tmp_path / "adapter", **config)
    adapter, merged = (
        read(folder, tiny_folder),
        weights_of(write_merged(tiny_folder, folder, tmp_path / "merged")),
    )
    base, specs = weights_of(tiny_folder), specs_of(tiny_folder)
    assert adapter.modules
    for name, weight in base.items():
        wanted = weight
        if name in adapter.projections:
            one, rank, first = adapter.projections[name], 8, 0
            wanted = weight.clone()
            for part, rows in enumerate(specs[name].source_rows):
                a = one.a[part * rank : (part + 1) * rank]
                wanted[first : first + rows] += one.scales[part] * (one.b[first : first + rows] @ a)
                first += rows
        torch.testing.assert_close(wanted, merged[name], rtol=1e-5, atol=1e-5)


def test_an_adapter_is_its_bytes_whatever_it_is_called(tiny_folder: Path, tmp_path: Path) -> None:
    first = write_adapter(tiny_folder, tmp_path / "a")
    again = Path(shutil.copytree(first, tmp_path / "b"))
    other = write_adapter(tiny_folder, tmp_path / "c", seed=1)
    scaled = Path(shutil.copytree(first, tmp_path / "d"))
    change(scaled, lora_alpha=9)
    digests = [read(folder, tiny_folder).digest for folder in (first, again, other, scaled)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_matrices_are_rounded_to_the_dtype_of_the_model_and_padded_by_zeros(
    dtype: torch.dtype, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tiny_folder, tmp_path / "adapter")
    adapter = read(folder, tiny_folder, max_rank=16, dtype=dtype)
    given = load_file(folder / WEIGHTS_NAME)["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"]
    a = adapter.projections["layers.1.gate_up"].a
    assert torch.equal(a[16:20], given.to(dtype))
    assert not a[20:].any()
    assert adapter.rank == 4
    assert adapter.num_bytes == sum(t.nbytes for one in adapter.projections.values() for t in one)


def change(folder: Path, **fields: Any) -> None:
    path = folder / CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


REFUSED: dict[str, tuple[dict[str, Any], type[LaminaError], str]] = {
    "dora": ({"use_dora": True}, UnsupportedError, "use_dora is True"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, UnsupportedError, "modules_to_save is"),
    "bias": ({"bias": "all"}, UnsupportedError, "bias is 'all'"),
    "lora_bias": ({"lora_bias": True}, UnsupportedError, "lora_bias is True"),
    "layer_replication": ({"layer_replication": [[0, 1]]}, UnsupportedError, "layer_replication is"),
    "target_parameters": ({"target_parameters": ["a"]}, UnsupportedError, "target_parameters is"),
    "tokens": ({"trainable_token_indices": [1]}, UnsupportedError, "trainable_token_indices is"),
    "kind": ({"peft_type": "IA3"}, UnsupportedError, "peft_type is 'IA3'"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, UnsupportedError, "init_lora_weights is 'pissa"),
    "rank": ({"r": "4"}, ConfigError, "r is '4'; wanted an integer"),
    "other rank": (
        {"rank_pattern": {"q_proj": 5}},
        LoadError,
        r"matrices of \[4, 64\] and \[\d+, 4\] for .*; wanted \[5, 64\]",
    ),
    "patterns": ({"rank_pattern": {"q_proj": 0}}, ConfigError, "rank_pattern is"),
    "no pattern": ({"target_modules": "q_(proj"}, ConfigError, "target_modules is"),
    "hostile pattern": (  # on a name of 30 characters Python would try for years
        {"target_modules": r"((\w|\.)+)+((\w|\.)+)+\1!"},
        ConfigError,
        "has the pattern",
    ),
    "hostile names": ({"target_modules": r"(?:(\w+|\.)+)+!"}, LoadError, "does not name"),
    "no layers pattern": (
        {"layers_to_transform": [0], "layers_pattern": ["(("]},
        ConfigError,
        "has the pattern",
    ),
    "alpha": ({"lora_alpha": 1e300}, ConfigError, "lora_alpha is 1e\\+300; wanted a number that float32"),
    "alpha of some": ({"alpha_pattern": {"q_proj": 1e300}}, ConfigError, "alpha_pattern is"),
    "no targets": ({"target_modules": None}, ConfigError, "target_modules is None"),
    "fewer": ({"target_modules": ["q_proj"]}, LoadError, "does not name"),
    "more layers": ({"layers_to_transform": [0]}, LoadError, "does not name"),
    "layers": ({"layers_to_transform": ["0"]}, ConfigError, "layers_to_transform is"),
}


@pytest.mark.parametrize("fields, kind, message", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_served_is_refused_by_its_name(
    fields: dict[str, Any], kind: type[LaminaError], message: str, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tiny_folder, tmp_path / "adapter")
    change(folder, **fields)
    with pytest.raises(kind, match=message):
        read(folder, tiny_folder)


def rewrite(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = dict(load_file(folder / WEIGHTS_NAME))
    edit(tensors)
    save_file(tensors, folder / WEIGHTS_NAME)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], type[LaminaError], str]] = {
    "one matrix": (lambda all_: all_.pop(FIRST), LoadError, "one matrix of model.layers.0.self_attn.q_proj"),
    "other names": (
        lambda all_: (
            all_.update({"base_model.model.transformer.h.0.lora_A.weight": torch.zeros(4, 64)})
            or all_.update({"base_model.model.transformer.h.0.lora_B.weight": torch.zeros(64, 4)})
        ),
        LoadError,
        "matrices of transformer.h.0, which this model has not",
    ),
    "the head": (
        lambda all_: (
            all_.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)})
            or all_.update({"base_model.model.lm_head.lora_B.weight": torch.zeros(320, 4)})
        ),
        LoadError,
        "matrices of lm_head, which this model has not, or not to be adapted",
    ),
    "embeddings": (
        lambda all_: all_.update(
            {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 320)}
        ),
        UnsupportedError,
        "embeddings",
    ),
    "a module less": (
        lambda all_: [all_.pop(FIRST), all_.pop(FIRST.replace("_A", "_B"))],
        LoadError,
        "lacks matrices of model.layers.0.self_attn.q_proj",
    ),
    "no module": (lambda all_: all_.clear(), LoadError, "lacks matrices"),
    "another shape": (lambda all_: all_.update({FIRST: torch.zeros(4, 65)}), LoadError, "wanted \\[4, 64\\]"),
    "integers": (
        lambda all_: all_.update({FIRST: torch.zeros(4, 64, dtype=torch.int8)}),
        UnsupportedError,
        "torch.int8",
    ),
}


@pytest.mark.parametrize("edit, kind, message", TENSORS.values(), ids=TENSORS.keys())
def test_tensors_that_do_not_fit_the_model_are_refused(
    edit: Callable[[dict[str, torch.Tensor]], object],
    kind: type[LaminaError],
    message: str,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    """Never the model's own answer in place of the adapter's."""
    folder = write_adapter(tiny_folder, tmp_path / "adapter")
    rewrite(folder, edit)
    with pytest.raises(kind, match=message):
        read(folder, tiny_folder)


def test_a_rank_beyond_the_room_is_refused_with_the_room_that_it_needs(
    tiny_folder: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tiny_folder, tmp_path / "adapter", rank_pattern={"up_proj": 9})
    with pytest.raises(UnsupportedError, match=r"rank 9, and max_lora_rank is 8; .*max_lora_rank=9"):
        read(folder, tiny_folder)
    assert read(folder, tiny_folder, max_rank=9).rank == 9


def test_files_that_are_missing_or_damaged_are_named(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="is no folder"):
        read(tmp_path / "nowhere", tiny_folder)
    with pytest.raises(LoadError, match=CONFIG_NAME):
        read(tiny_folder, tiny_folder)
    folder = write_adapter(tiny_folder, tmp_path / "adapter")
    whole = (folder / WEIGHTS_NAME).read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", b"\xff" * 100):
        (folder / WEIGHTS_NAME).write_bytes(damaged)
        with pytest.raises(LoadError, match="damaged"):
            read(folder, tiny_folder)
    (folder / WEIGHTS_NAME).rename(folder / "adapter_model.bin")
    with pytest.raises(LoadError, match=r"adapter_model\.bin alone; save it again"):
        read(folder, tiny_folder)


def test_which_modules_are_meant_is_as_peft_has_it(tiny_folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    modules = [f"model.layers.{layer}.mlp.{name}" for layer in (0, 1, 11) for name in ALL_MODULES]
    cases: list[dict[str, Any]] = [
        {"target_modules": ["q_proj", "j_proj", "proj"]},
        {"target_modules": ["layers.1.mlp.k_proj", "model.layers.0.mlp.o_proj"]},
        {"target_modules": r"model\.layers\.1\d?\..*"},
        {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [1, 11]},
        {"target_modules": ["q_proj"], "layers_to_transform": 11, "layers_pattern": ["h", "layers"]},
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*\.1\..*"},
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["0.mlp.q_proj"]},
    ]
    for case in cases:
        LoraConfig(r=4, **case).save_pretrained(tmp_path)
        ours = read_peft_config(tmp_path).targeted(modules)
        theirs = LoraConfig.from_pretrained(tmp_path)
        excluded = [m for m in modules if not bool(check_target_module_exists(theirs, m))]
        assert set(ours) == {*modules} - {*excluded}, case
