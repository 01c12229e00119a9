"""One module in each format, of any shape: its parts are its scheme's, and mean what the tool meant."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import LoadError
from lamina.models.checkpoints.quantized.configs import READERS
from lamina.models.checkpoints.quantized.formats import Format
from lamina.models.checkpoints.quantized.modules import QuantizedModule
from lamina.models.checkpoints.shards import Header
from lamina.models.fields import Fields

from . import writers
from .writers import DYNAMIC, PACKED, Array, Module, ct, weights_of

Write = Callable[[Array], Module]
MODULE = "model.layers.0.mlp.down_proj"
DTYPES = {
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
}


def format_of(config: dict[str, Any]) -> Format:
    form = READERS[config["quant_method"]](Fields(config, "config.json")).format_of(MODULE)
    assert form is not None
    return form


def module_of(form: Format, shape: tuple[int, ...]) -> QuantizedModule:
    return QuantizedModule(name=MODULE, parameter="down", start=0, shape=shape, format=form)


def kept(form: Format, tensors: dict[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """What the parts stand for, which have the shapes and dtypes that the scheme says."""
    module = module_of(form, shape)
    headers = {
        f"{MODULE}.{name}": Header(tuple(one.shape), DTYPES[one.dtype]) for name, one in tensors.items()
    }
    names = module.held(headers, Path("folder"))
    assert set(names.values()) == set(headers)
    parts = module.unpack({key: tensors[name.removeprefix(f"{MODULE}.")] for key, name in names.items()})
    own = [
        torch.empty(size, dtype=dtype) for size, dtype in form.scheme.tensors(shape, torch.float32).values()
    ]
    for part, values in zip(own, parts, strict=True):
        part.copy_(values)
    return form.scheme.restore(own)


def normal(shape: tuple[int, int], seed: int) -> Array:
    weight = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    weight[0] = 0.0
    return weight


def check(
    config: dict[str, Any], write: Callable[[Array], Module], shape: tuple[int, int], seed: int
) -> None:
    tensors, meant = write(normal(shape, seed))
    assert torch.equal(kept(format_of(config), tensors, shape), torch.from_numpy(meant))


def gptq(group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True, **more}


seeds = st.integers(0, 9)
groups = st.sampled_from([(32, 1), (32, 3), (64, 2), (128, 1), (-1, 64), (-1, 40)])


@given(
    groups=groups,
    eights=st.integers(1, 4),
    sym=st.booleans(),
    version=st.integers(1, 2),
    seed=seeds,
)
def test_gptq(groups: tuple[int, int], eights: int, sym: bool, version: int, seed: int) -> None:
    group, count = groups
    shape = (8 * eights, count if group == -1 else group * count)
    config = gptq(group, sym=sym, checkpoint_format="gptq" if version == 1 else "gptq_v2")
    check(config, partial(writers.gptq, group=group, sym=sym, version=version), shape, seed)


@given(groups=groups, rows=st.integers(1, 20), sym=st.booleans(), packed=st.booleans(), seed=seeds)
def test_packed_words_of_compressed_tensors(
    groups: tuple[int, int], rows: int, sym: bool, packed: bool, seed: int
) -> None:
    group, count = groups
    strategy: dict[str, Any] = {"strategy": "channel"}
    strategy = strategy if group == -1 else {"strategy": "group", "group_size": group}
    write = partial(writers.ct_packed, group=group, sym=sym, packed_zeros=packed)
    dialect = ct("pack-quantized", weights_of(4, "int", **strategy, symmetric=sym), write, "w4a16")
    check(dialect.config, write, (rows, count if group == -1 else group * count), seed)


@given(
    group=st.sampled_from([32, 64, 128]),
    count=st.integers(1, 3),
    eights=st.integers(1, 4),
    seed=seeds,
)
def test_awq(group: int, count: int, eights: int, seed: int) -> None:
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": group, "version": "GEMM", "zero_point": True}
    check(config, partial(writers.awq, group=group), (8 * eights, group * count), seed)


@given(rows=st.integers(1, 300), columns=st.integers(1, 300), seed=seeds)
def test_blocks_of_float8_end_short(rows: int, columns: int, seed: int) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    check(config, partial(writers.float8, by="block", scale="weight_scale_inv"), (rows, columns), seed)


@given(
    by=st.sampled_from(["tensor", "channel", "group"]),
    rows=st.integers(1, 40),
    columns=st.integers(1, 300),
    seed=seeds,
)
def test_float8_of_compressed_tensors(by: str, rows: int, columns: int, seed: int) -> None:
    write = partial(writers.float8, by=by, like=lambda scales: scales[0] if by == "tensor" else scales)
    weights = weights_of(8, "float", by, group_size=128 if by == "group" else None)
    check(
        ct("float-quantized", weights, write, "fp8", input_activations=DYNAMIC).config,
        write,
        (rows, columns),
        seed,
    )


@given(rows=st.integers(1, 20), sixteens=st.integers(1, 4), modelopt=st.booleans(), seed=seeds)
def test_nvfp4(rows: int, sixteens: int, modelopt: bool, seed: int) -> None:
    write = partial(writers.nvfp4, modelopt=modelopt)
    weights = weights_of(4, "float", "tensor_group", group_size=16)
    config = ct("nvfp4-pack-quantized", weights, write, None).config
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"} if modelopt else config
    check(config, write, (rows + 1, 16 * sixteens), seed)


@given(rows=st.integers(1, 20), columns=st.integers(1, 40).map(lambda half: 2 * half), nested=st.booleans())
def test_blocks_of_nf4_cross_rows(rows: int, columns: int, nested: bool) -> None:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    weight = normal((rows, columns), 0) + np.float32(0.01)
    tensors, meant = writers.nf4(weight, nested=nested)
    assert torch.equal(kept(format_of(config), tensors, (rows, columns)), torch.from_numpy(meant))


def shuffled_groups(columns: int, group: int, seed: int) -> Array:
    """The group of each column, out of order."""
    return np.random.default_rng(seed).permutation(np.arange(columns) // group)


@given(group=st.sampled_from([32, 64]), count=st.integers(1, 4), sym=st.booleans(), seed=seeds)
def test_columns_in_an_order_of_their_own(group: int, count: int, sym: bool, seed: int) -> None:
    """GPTQ's desc_act, compressed-tensors' actorder; the product takes x in that order."""
    group_of = shuffled_groups(group * count, group, seed)
    of_gptq = partial(writers.gptq, group=group, sym=sym, version=1, group_of=group_of)
    check(gptq(group, sym=sym, desc_act=True), of_gptq, (16, group * count), seed)
    write = partial(writers.ct_packed, group=group, sym=sym, group_of=group_of)
    weights = weights_of(4, "int", "group", group_size=group, symmetric=sym, actorder="group")
    dialect = ct("pack-quantized", weights, write, "w4a16")
    check(dialect.config, write, (16, group * count), seed)
    tensors, meant = write(normal((16, group * count), seed))
    form, x = format_of(dialect.config), torch.randn(3, group * count)
    multiply = form.scheme.multiply
    assert multiply is not None
    product = multiply(x, form.unpack(tensors, meant.shape), None)
    torch.testing.assert_close(product, x @ torch.from_numpy(meant).T, rtol=1e-4, atol=1e-4)


def test_a_file_says_v2_by_its_words_and_v1_by_its_words_whatever_the_config_says() -> None:
    weight = normal((16, 64), 3)
    for version in (1, 2):
        for name in ("gptq", "gptq_v2"):
            tensors, meant = writers.gptq(weight, group=32, sym=True, version=version)
            form = format_of(gptq(32, checkpoint_format=name))
            assert torch.equal(kept(form, tensors, weight.shape), torch.from_numpy(meant))
    tensors["qzeros"][1, 1] ^= 1
    with pytest.raises(LoadError, match=r"down_proj has qzeros other than 8 .* though sym is true"):
        kept(form, tensors, weight.shape)


def test_a_zero_point_of_fifteen_in_v1_is_sixteen() -> None:
    tensors, _ = writers.gptq(normal((8, 32), 1), group=32, sym=False, version=1)
    tensors["qzeros"].fill_(-1)  # fifteen each
    form = format_of(gptq(32, sym=False))
    numbers = torch.from_numpy(writers.numbers_of(normal((8, 32), 1), 32, zero=True)[0])
    expected = (numbers - 16) * tensors["scales"].float().T
    assert torch.equal(kept(form, tensors, (8, 32)), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given["g_idx"].fill_(0), "does not put 64 columns into 2 equal groups"),
        (lambda given: given["g_idx"].sub_(1), "does not put 64 columns into 2 equal groups"),
        (lambda given: given["g_idx"].add_(1000), "does not put 64 columns into 2 equal groups"),
        (
            lambda given: given["scales"].view(-1)[:1].fill_(torch.nan),
            r"down_proj\.scales holds values that are not",
        ),
    ],
)
def test_damage_in_a_module_is_refused_by_name(change: Callable[[Any], Any], message: str) -> None:
    tensors, _ = writers.gptq(normal((16, 64), 0), group=32, sym=True, version=1)
    change(tensors)
    with pytest.raises(LoadError, match=message):
        kept(format_of(gptq(32, desc_act=True)), tensors, (16, 64))


def test_an_order_that_the_config_does_not_tell_of_is_refused() -> None:
    group_of = shuffled_groups(64, 32, 0)
    tensors, _ = writers.gptq(normal((16, 64), 0), group=32, sym=True, version=1, group_of=group_of)
    with pytest.raises(LoadError, match="g_idx that is out of order though desc_act is false"):
        kept(format_of(gptq(32)), tensors, (16, 64))


def test_a_weight_shape_of_another_matrix_is_refused() -> None:
    write = partial(writers.ct_packed, group=32, sym=True)
    dialect = ct("pack-quantized", weights_of(4, "int", "group", group_size=32), write, "w4a16")
    tensors, _ = write(normal((4, 64), 0))
    tensors["weight_shape"][0] = 5
    with pytest.raises(LoadError, match=r"weight_shape of \[5, 64\]; its config calls for \[4, 64\]"):
        kept(format_of(dialect.config), tensors, (4, 64))


@pytest.mark.parametrize(
    "state", [b"", b"{", b'{"quant_type": "nf4", "blocksize": 64, "shape": [4, 4]}', b"[1]"]
)
def test_a_state_of_nf4_that_says_something_else_is_refused(state: bytes) -> None:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    tensors, _ = writers.nf4(normal((4, 8), 0) + np.float32(0.01), nested=False)
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(state), dtype=torch.uint8)
    with pytest.raises(LoadError, match=r"down_proj (has a quant_state that cannot be read|says it is nf4)"):
        kept(format_of(config), tensors, (4, 8))


SYMMETRIC = {
    "four bits": (PACKED.config, PACKED.write),
    "whole numbers": (
        ct("int-quantized", weights_of(8, "int", "channel"), writers.ct_packed_bytes, "int8").config,
        partial(writers.ct_int8, by_row=True),
    ),
    "float8": (
        ct("float-quantized", weights_of(8, "float", "channel"), writers.ct_packed_bytes, None).config,
        partial(writers.float8, by="channel"),
    ),
}


@pytest.mark.parametrize("name", SYMMETRIC)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn])
def test_zero_points_beside_symmetric_weights_may_lie_in_a_file_if_they_are_zero(
    name: str, dtype: torch.dtype
) -> None:
    config, write = SYMMETRIC[name]
    tensors, meant = write(normal((16, 64), 1) + 0.1)
    idle = tensors | {"weight_zero_point": torch.zeros(16, 1).to(dtype)}
    assert torch.equal(kept(format_of(config), idle, (16, 64)), torch.from_numpy(meant))
    if dtype == torch.int32:
        eights = tensors | {"weight_zero_point": torch.full((2, 2), -0x77777778, dtype=dtype)}
        assert torch.equal(kept(format_of(config), eights, (16, 64)), torch.from_numpy(meant))
    idle["weight_zero_point"] = torch.ones(16, 1).to(dtype)
    with pytest.raises(LoadError, match="down_proj has a weight_zero_point other than zero though symmetric"):
        kept(format_of(config), idle, (16, 64))
