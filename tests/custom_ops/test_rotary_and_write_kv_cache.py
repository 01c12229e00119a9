"""lamina::rotary_and_write_kv_cache: what the two ops do one after the other."""

import pytest
import torch

from lamina.common.errors import ShapeError
from lamina.custom_ops import rotary_and_write_kv_cache, rotary_embedding, write_kv_cache
from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.rotary_and_write_kv_cache import reference
from lamina.custom_ops.write_kv_cache.int8_rows import INT8, cache_width

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def make_arguments(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    qkv = torch.randn(5, 8, 16).to(dtype)
    angles = torch.rand(5, 8, dtype=torch.float64 if dtype == torch.float64 else torch.float32) * 100
    keys, values = (torch.full((3, 4, 2, 16), 7.0, dtype=dtype) for _ in range(2))
    return {
        "query": qkv[:, :4],
        "key": qkv[:, 4:6],
        "value": qkv[:, 6:],
        "cos": angles.cos(),
        "sin": angles.sin(),
        "key_cache": keys,
        "value_cache": values,
        "slot_mapping": torch.tensor([3, -1, 11, 0, -1], dtype=torch.int32),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_equals_rotary_embedding_followed_by_write_kv_cache(dtype: torch.dtype) -> None:
    arguments = make_arguments(dtype)
    key_cache, value_cache = arguments["key_cache"].clone(), arguments["value_cache"].clone()
    query, key = rotary_embedding(*(arguments[name] for name in ("query", "key", "cos", "sin")))
    write_kv_cache(key, arguments["value"], key_cache, value_cache, arguments["slot_mapping"])
    assert torch.equal(rotary_and_write_kv_cache(**arguments), query)
    assert torch.equal(arguments["key_cache"], key_cache)
    assert torch.equal(arguments["value_cache"], value_cache)
    assert (key_cache.flatten(0, 1)[1:3] == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 3, 300])
@pytest.mark.parametrize("head_dim", [2, 20, 64, 96])
def test_the_kernel_rounds_as_the_formula_does(dtype: torch.dtype, num_tokens: int, head_dim: int) -> None:
    """Whatever the strides: of heads in a wider row, of elements apart, of caches inside wider ones."""
    qkv = torch.randn(num_tokens, 9, 2 * head_dim).to(dtype)
    angles = torch.rand(num_tokens, head_dim // 2) * 100
    slots = torch.randperm(512)[:num_tokens].int()
    slots[1::3] = -1
    results = []
    for call in (
        select("rotary_and_write_kv_cache", device=qkv.device, dtype=dtype, provider="cpu").call,
        reference.rotary_and_write_kv_cache,
    ):
        caches = [torch.full((32, 16, 3, head_dim + 3), 7.0, dtype=dtype)[..., :head_dim] for _ in range(2)]
        heads = qkv[:, :5, ::2], qkv[:, 5:7, :head_dim], qkv[:, 7:, head_dim:]
        query = call(*heads, angles.cos(), angles.sin(), *(cache[:, :, :2] for cache in caches), slots)
        results.append((query, *caches))
    assert all(torch.equal(ours, formula) for ours, formula in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [2, 20, 64, 96])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.37, 1.7)])
def test_a_cache_in_fp8_takes_keys_that_are_rounded_to_their_own_dtype_first(
    dtype: torch.dtype, head_dim: int, scales: tuple[float, float]
) -> None:
    qkv, angles = torch.randn(40, 9, head_dim).to(dtype), torch.rand(40, head_dim // 2) * 100
    query, key, value = qkv[:, :5], qkv[:, 5:7], qkv[:, 7:]
    slots = torch.randperm(64)[:40].int()
    slots[1::3] = -1
    fused, plain = (
        [torch.full((4, 16, 2, head_dim + 3), 7.0).to(FP8)[..., :head_dim] for _ in range(2)]
        for _ in range(2)
    )
    out = rotary_and_write_kv_cache(query, key, value, angles.cos(), angles.sin(), *fused, slots, *scales)
    rotated, rotated_key = rotary_embedding(query, key, angles.cos(), angles.sin())
    write_kv_cache(rotated_key, value, *plain, slots, *scales)
    assert torch.equal(out, rotated)
    assert all(torch.equal(x.float(), y.float()) for x, y in zip(fused, plain, strict=True))


@pytest.mark.parametrize("token", [0, 2, 4])
def test_a_slot_beyond_the_cache_is_refused_before_anything_is_written(token: int) -> None:
    arguments = make_arguments()
    arguments["slot_mapping"] = torch.tensor([3, -1, 2, 0, -1], dtype=torch.int32)
    arguments["slot_mapping"][token] = 12
    with pytest.raises(ShapeError, match=rf"slot_mapping\[{token}\] is 12; wanted less than 12"):
        rotary_and_write_kv_cache(**arguments)
    assert (arguments["key_cache"] == 7.0).all()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"cos": torch.zeros(5, 16)}, r"rotary_and_write_kv_cache: cos is \[5, 16\]"),
        ({"value": torch.zeros(5, 3, 16)}, r"rotary_and_write_kv_cache: key is .*, value \[5, 3, 16\]"),
        ({"slot_mapping": torch.zeros(4, dtype=torch.int32)}, r"wanted \[5\] int32"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        rotary_and_write_kv_cache(**make_arguments() | change)


def test_opcheck() -> None:
    arguments = tuple(make_arguments().values())
    torch.library.opcheck(torch.ops.lamina.rotary_and_write_kv_cache.default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [2, 20, 64])
def test_a_cache_in_int8_takes_keys_that_are_rounded_to_their_own_dtype_first(
    dtype: torch.dtype, head_dim: int
) -> None:
    qkv, angles = torch.randn(40, 9, head_dim).to(dtype), torch.rand(40, head_dim // 2) * 100
    query, key, value = qkv[:, :5], qkv[:, 5:7], qkv[:, 7:]
    slots = torch.randperm(64)[:40].int()
    slots[1::3] = -1
    width = cache_width(head_dim, INT8)
    fused, plain = ([torch.full((4, 16, 2, width), 7, dtype=INT8) for _ in range(2)] for _ in range(2))
    out = rotary_and_write_kv_cache(query, key, value, angles.cos(), angles.sin(), *fused, slots)
    rotated, rotated_key = rotary_embedding(query, key, angles.cos(), angles.sin())
    write_kv_cache(rotated_key, value, *plain, slots)
    assert torch.equal(out, rotated)
    assert all(torch.equal(x, y) for x, y in zip(fused, plain, strict=True))
