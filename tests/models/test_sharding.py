"""Shares of weights: each rank keeps its part of every tensor, quantized or not, and reads no other."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import UnsupportedError
from lamina.models import ParameterSpec, find_model
from lamina.models.checkpoints import weights as reading
from lamina.models.checkpoints.loaded_weights import LoadedWeights
from lamina.models.checkpoints.weight_update import check_update, headers_of, write
from lamina.models.checkpoints.weights import dummy_weights, load_weights, read_checkpoint
from lamina.models.config import ModelConfig, read_model_config
from lamina.models.quantization.model_schemes import ColumnsOfRank, RowsOfRank, uniform
from lamina.models.quantization.scheme import QuantScheme, StoredWeight, find_scheme
from lamina.models.quantization.w4a16 import w4a16
from lamina.models.registry import ModelDefinition
from lamina.models.sharding import config_of_rank, sharding_of

from ..families import FAMILIES
from .checkpoints.quantized import writers
from .checkpoints.quantized.test_dialects import DIALECTS

INTO: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


def model_of(folder: Path) -> tuple[ModelDefinition, ModelConfig]:
    config = read_model_config(folder)
    return find_model(config.architecture), config


def of_ranks(folder: Path, ranks: int, scheme: QuantScheme | None = None) -> list[LoadedWeights]:
    """The weights of every rank, one after the other."""
    definition, config = model_of(folder)
    checkpoint = read_checkpoint(definition, config, folder)
    schemes = checkpoint.schemes if scheme is None else uniform(scheme, checkpoint.specs)
    if ranks > 1:
        schemes = schemes.of_rank(sharding_of(definition, config, ranks))
    return [load_weights(checkpoint, schemes=schemes, rank=rank, **INTO) for rank in range(ranks)]


def dense(weights: LoadedWeights) -> dict[str, Tensor]:
    """What every parameter of a rank stands for."""
    found = {}
    for name, kept in weights.schemes.join(weights.by_name).items():
        value: Any = kept
        if name in weights.specs:
            value = value.weight if isinstance(value, ColumnsOfRank) else value
            value = value.rows if isinstance(value, RowsOfRank) else value
            found[name] = value.restored() if isinstance(value, StoredWeight) else value
    return found


def wanted(spec: ParameterSpec, own: ParameterSpec, whole: Tensor, rank: int, ranks: int) -> Tensor:
    """A rank's part of a parameter, by chunks of its parts; several have the same where there are too few."""
    if spec.shard_axis is None:
        return whole
    if spec.shard_axis == 1:
        return whole.chunk(ranks, 1)[rank]
    chunks = []
    for part, size in zip(whole.split(spec.part_rows), own.part_rows, strict=True):
        short = -part.shape[0] % size
        padded = torch.cat((part, part.new_zeros(short, *part.shape[1:])))
        pieces = padded.split(size)
        chunks.append(pieces[rank * len(pieces) // ranks])
    return torch.cat(chunks)


def check(folder: Path, ranks: int, scheme: QuantScheme | None = None) -> None:
    definition, config = model_of(folder)
    specs, own = definition.parameters(config), definition.parameters(config_of_rank(config, ranks))
    (alone,) = of_ranks(folder, 1, scheme)
    whole = dense(alone)
    for rank, weights in enumerate(of_ranks(folder, ranks, scheme)):
        for name, value in dense(weights).items():
            expected = wanted(specs[name], own[name], whole[name], rank, ranks)
            assert torch.equal(value, expected), (name, rank)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_rank_has_its_part_of_every_weight(name: str, ranks: int, tmp_path: Path) -> None:
    check(FAMILIES[name].save(tmp_path, max_shard_size="100KB"), ranks)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "scheme",
    [find_scheme("int8"), find_scheme("fp8"), find_scheme("fp8_block"), w4a16(), w4a16(64, zero=True)],
)
def test_a_rank_keeps_of_a_row_what_one_process_would(
    scheme: QuantScheme, ranks: int, tmp_path: Path
) -> None:
    check(FAMILIES["phi3"].save(tmp_path, intermediate_size=512, head_dim=32), ranks, scheme)


@pytest.mark.parametrize(
    "name",
    [
        "gptq, groups of 32",
        "gptq, groups of -1",
        "gptq v2, zero points",
        "awq, groups of 128",
        "compressed-tensors w4a16, zero points a row",
        "compressed-tensors w8a8",
        "compressed-tensors float8 by tensor",
        "compressed-tensors float8 by group",
        "compressed-tensors nvfp4",
        "fp8 by block",
        "nf4, double",
    ],
)
def test_shares_of_quantized_modules_stand_for_shares_of_what_the_modules_do(
    name: str, make_tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}
    folder, _ = writers.save(tmp_path, make_tiny_folder(**sizes), DIALECTS[name])
    check(folder, 2)


def test_an_order_of_columns_and_a_block_that_would_be_cut_are_refused_by_name(
    make_tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "num_hidden_layers": 1}
    folder, _ = writers.save(tmp_path, make_tiny_folder(**sizes), DIALECTS["fp8 by block"])
    told = r"layers.0.down: quantization is 'fp8_block', and ranks are to have 192 of 384 columns.*of 128"
    with pytest.raises(UnsupportedError, match=told):
        of_ranks(folder, 2)
    with pytest.raises(UnsupportedError, match=r"64 of 128 columns each, which are in an order of their own"):
        w4a16(32, order=True).for_columns(128, 64)
    with pytest.raises(UnsupportedError, match="8 of 64 columns each, by groups of 32"):
        w4a16(32).for_columns(64, 8)
    whole_rows = dataclasses.replace(find_scheme("int8"), name="own", share=None, cut=None)
    with pytest.raises(UnsupportedError, match="'own', which keeps rows of 64 columns whole"):
        whole_rows.for_columns(64, 32)


def test_of_what_is_kept_as_it_lies_no_other_part_is_read(tmp_path: Path, monkeypatch: Any) -> None:
    folder = FAMILIES["granite"].save(tmp_path)
    definition, config = model_of(folder)
    checkpoint = read_checkpoint(definition, config, folder)
    read: list[int] = []
    tensors = reading._tensors

    def counted(path: Path, parts: Any) -> Any:
        for part, tensor in tensors(path, parts):
            read.append(tensor.nbytes)
            yield part, tensor

    monkeypatch.setattr(reading, "_tensors", counted)
    schemes = checkpoint.schemes.of_rank(sharding_of(definition, config, 4))
    weights = load_weights(checkpoint, schemes=schemes, rank=3, **INTO)
    assert sum(read) == sum(weights.by_name[name].nbytes for name in weights.specs)


def test_a_share_is_updated_by_whole_tensors(tmp_path: Path) -> None:
    weights = of_ranks(FAMILIES["granite"].save(tmp_path), 2)[1]
    new = {"model.layers.0.mlp.down_proj.weight": torch.randn(64, 96)}
    write(weights, check_update(weights, headers_of(new)), new)
    (whole,) = new.values()
    name = next(name for name, spec in weights.specs.items() if spec.sources == tuple(new))
    assert torch.equal(weights.by_name[name], whole[:, 48:].to(weights.dtype))


def test_weights_made_up_are_those_of_one_process(tmp_path: Path) -> None:
    definition, config = model_of(FAMILIES["qwen2"].save(tmp_path))
    scheme, specs = uniform(find_scheme("int8"), definition.parameters(config)), definition.parameters(config)
    sharding = sharding_of(definition, config, 4)
    whole = dense(dummy_weights(definition, config, seed=7, schemes=scheme, **INTO))
    for rank in range(4):
        own = dummy_weights(definition, config, seed=7, schemes=scheme.of_rank(sharding), rank=rank, **INTO)
        for name, value in dense(own).items():
            assert torch.equal(value, wanted(specs[name], sharding.specs[name], whole[name], rank, 4)), name


@pytest.mark.parametrize(
    "ranks, changes, told",
    [
        (3, {}, "tensor_parallel is 3; wanted a divisor of num_attention_heads, 4"),
        (8, {}, "tensor_parallel is 8; wanted a divisor of num_attention_heads, 4"),
        (4, {"vocab_size": 3}, "tensor_parallel is 4; wanted at most vocab_size, 3"),
        (4, {"intermediate_size": 98}, "tensor_parallel is 4; wanted a divisor of intermediate_size, 98"),
        (
            4,
            {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 16},
            "tensor_parallel is 4; wanted a divisor or a multiple of num_key_value_heads, 6",
        ),
    ],
)
def test_what_cannot_be_shared_out_evenly_is_refused(
    ranks: int, changes: Mapping[str, int], told: str, tmp_path: Path
) -> None:
    FAMILIES["qwen3"].config(**changes).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=told):
        sharding_of(*model_of(tmp_path), ranks)


@pytest.mark.parametrize(
    "changes, told",
    [
        (
            {"shard_axis": None},
            r"layers.0.o is \[64, 64\], \[64, 32\] for each rank, where shard_axis is None",
        ),
        ({"projection": False}, "layers.0.o is .* no projection and no table"),
        ({"shape": (64, 64)}, r"layers.0.o is \[64, 64\], \[64, 64\] for each rank; wanted equal parts"),
    ],
    ids=str,
)
def test_a_definition_that_does_not_say_how_is_refused(changes: Any, told: str, tmp_path: Path) -> None:
    FAMILIES["smollm3"].config().save_pretrained(tmp_path)
    definition, config = model_of(tmp_path)

    def parameters(config: ModelConfig) -> Mapping[str, ParameterSpec]:
        specs = dict(definition.parameters(config))
        return specs | {"layers.0.o": dataclasses.replace(specs["layers.0.o"], **changes)}

    with pytest.raises(UnsupportedError, match=f"tensor_parallel is 2, and {told}"):
        sharding_of(dataclasses.replace(definition, parameters=parameters), config, 2)


@given(
    kv_heads=st.sampled_from([1, 2, 3, 4, 6, 8]),
    per_kv_head=st.sampled_from([1, 2, 4, 8]),
    ranks=st.integers(1, 16),
    columns=st.integers(1, 12),
    more_ids=st.integers(0, 200),
)
def test_ranks_together_keep_every_row_and_column(
    kv_heads: int, per_kv_head: int, ranks: int, columns: int, more_ids: int
) -> None:
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=ranks + more_ids,
        hidden_size=8,
        intermediate_size=columns * ranks,
        num_layers=1,
        num_heads=kv_heads * per_kv_head,
        num_kv_heads=kv_heads,
        head_dim=2,
    )
    can_be = config.num_heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
    if not can_be:
        with pytest.raises(UnsupportedError, match=f"tensor_parallel is {ranks}; wanted a divisor"):
            config_of_rank(config, ranks)
        return
    sharding = sharding_of(find_model(config.architecture), config, ranks)
    for name, spec in sharding.whole.items():
        rows: dict[str, list[int]] = {source: [0] * shape[0] for source, shape in spec.source_shapes.items()}
        kept_columns = [0] * spec.shape[-1]
        for rank in range(ranks):
            for source, share in sharding.shares(name, rank).items():
                for run in share.runs:
                    for row in range(run.start, run.start + run.num_rows):
                        rows[source][row] += 1
            first, count = share.columns or (0, spec.shape[-1])
            for column in range(first, first + count):
                kept_columns[column] += 1
        for source, times in rows.items():
            repeated = ranks // kv_heads if "k_proj" in source or "v_proj" in source else 1
            expected = ranks if spec.shard_axis != 0 or ranks == 1 else max(1, repeated)
            assert set(times) == {expected}, (name, source)
        assert set(kept_columns) == {1 if spec.shard_axis == 1 else ranks}, name


def test_ranks_of_one_head_of_keys_all_have_it(tmp_path: Path) -> None:
    check(FAMILIES["qwen2"].save(tmp_path, num_key_value_heads=1), 4)
