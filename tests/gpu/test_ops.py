"""The kernels of every op but attention, by each provider, against the formula; new memory is poison."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.common.errors import ShapeError
from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.add_rms_norm import reference as add_rms_norm
from lamina.custom_ops.add_zero_centred_rms_norm import reference as add_zero_centred_rms_norm
from lamina.custom_ops.copy_blocks import reference as copy_blocks
from lamina.custom_ops.gelu_and_mul import reference as gelu_and_mul
from lamina.custom_ops.qk_norm import reference as qk_norm
from lamina.custom_ops.rms_norm import reference as rms_norm
from lamina.custom_ops.rotary_and_write_kv_cache import reference as rotary_and_write_kv_cache
from lamina.custom_ops.rotary_embedding import reference as rotary_embedding
from lamina.custom_ops.silu_and_mul import reference as silu_and_mul
from lamina.custom_ops.write_kv_cache import reference as write_kv_cache
from lamina.custom_ops.zero_centred_rms_norm import reference as zero_centred_rms_norm

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
CANARY = 7.0
EPS = 1e-5
FLOOR = {torch.float32: 8 * torch.finfo(torch.float32).eps}  # of the largest value: a few last places

providers = pytest.mark.parametrize("provider", ["cuda", "triton"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
any_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8], ids=str)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty and its kin hand out NaN, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def check(assert_close_to_reference: Callable[..., None]) -> Callable[..., None]:
    """check(formula, call, *arguments): call errs at most twice as much as the formula in the same dtype."""

    def compare(formula: Callable[..., Any], call: Callable[..., Any], *arguments: Any) -> None:
        wide = [x.double() if isinstance(x, Tensor) else x for x in arguments]
        results = call(*arguments), formula(*wide), formula(*arguments)
        for out, exact, naive in zip(*(as_tuple(result) for result in results), strict=True):
            assert out.is_contiguous()
            assert out.dtype == naive.dtype
            if out.numel():
                floor = FLOOR.get(out.dtype, 0.0) * exact.abs().max().item()
                assert_close_to_reference(out, exact, naive, floor=max(floor, 1e-6))

    return compare


def as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def call_of(op: str, provider: str, dtype: torch.dtype) -> Callable[..., Any]:
    return select(op, device=torch.device("cuda"), dtype=dtype, provider=provider).call


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


NORM_FORMULAS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm.rms_norm,
    "zero_centred_rms_norm": zero_centred_rms_norm.zero_centred_rms_norm,
}
SUM_FORMULAS: dict[str, Callable[..., Any]] = {
    "add_rms_norm": add_rms_norm.add_rms_norm,
    "add_zero_centred_rms_norm": add_zero_centred_rms_norm.add_zero_centred_rms_norm,
}
GATE_FORMULAS: dict[str, Callable[..., Any]] = {
    "silu_and_mul": silu_and_mul.silu_and_mul,
    "gelu_and_mul": gelu_and_mul.gelu_and_mul,
}
NORMS = [(1, 64), (3, 100), (300, 576), (1, 2048), (600, 4096), (2, 5120), (5, 8192), (2, 16384), (1, 40008)]


@providers
@dtypes
@pytest.mark.parametrize("shape", [*NORMS, (0, 64), (7, 1), (2, 3, 96)], ids=str)
def test_norms(check: Callable[..., None], provider: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual = random(*shape, dtype=dtype, scale=3), random(*shape, dtype=dtype, scale=3)
    weight = random(shape[-1], dtype=dtype)
    for op, formula in NORM_FORMULAS.items():
        check(formula, call_of(op, provider, dtype), x, weight, EPS)
    for op, formula in SUM_FORMULAS.items():
        for unrounded in (False, True):
            check(formula, call_of(op, provider, dtype), x, residual, weight, EPS, unrounded)


@providers
@dtypes
@pytest.mark.parametrize("hidden,start", [(256, 0), (256, 1), (255, 8)])
def test_norms_of_rows_inside_wider_rows(
    check: Callable[..., None], provider: str, dtype: torch.dtype, hidden: int, start: int
) -> None:
    wide = random(5, 3 * hidden + 8, dtype=dtype)
    x, residual = wide[:, start : start + hidden], wide[:, -hidden:]
    weight = random(2, hidden, dtype=dtype).T.contiguous().T[1]
    transposed = random(hidden, 5, dtype=dtype).T
    for op, formula in NORM_FORMULAS.items():
        check(formula, call_of(op, provider, dtype), x, weight, EPS)
    for op, formula in SUM_FORMULAS.items():
        call = call_of(op, provider, dtype)
        check(formula, call, x, residual, weight, EPS, True)
        check(formula, call, transposed, transposed, weight, EPS)


@providers
@dtypes
@pytest.mark.parametrize("unrounded", [False, True])
@pytest.mark.parametrize("op", SUM_FORMULAS)
def test_the_sum_that_is_handed_on_has_the_formulas_bits(
    provider: str, dtype: torch.dtype, op: str, unrounded: bool
) -> None:
    x, residual = (random(33, 1024, dtype=dtype, scale=9) for _ in range(2))
    weight = random(1024, dtype=dtype)
    assert torch.equal(call_of(op, provider, dtype)(x, residual, weight, EPS, unrounded)[1], x + residual)


@providers
@pytest.mark.parametrize("op", SUM_FORMULAS)
def test_a_sum_is_normed_before_it_is_rounded_where_that_is_asked_for(provider: str, op: str) -> None:
    x, residual, weight = (random(*shape, dtype=torch.bfloat16) for shape in ((64, 512), (64, 512), (512,)))
    call = call_of(op, provider, torch.bfloat16)
    before, after = (call(x, residual, weight, EPS, unrounded) for unrounded in (False, True))
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0])


@providers
@dtypes
@pytest.mark.parametrize("op", [*NORM_FORMULAS, *SUM_FORMULAS])
def test_a_row_of_a_norm_has_the_same_bits_in_any_batch(provider: str, dtype: torch.dtype, op: str) -> None:
    x, weight = random(900, 4096, dtype=dtype), random(4096, dtype=dtype)
    call = call_of(op, provider, dtype)
    rows = (x,) if op in NORM_FORMULAS else (x, x.flip(1))
    whole = as_tuple(call(*rows, weight, EPS))[0]
    assert torch.equal(as_tuple(call(*(row[:1] for row in rows), weight, EPS))[0], whole[:1])


@providers
@dtypes
@pytest.mark.parametrize("shape", [(1, 2), (3, 200), (5, 2 * 1001), (64, 2 * 4096), (2, 2 * 14336), (0, 8)])
@pytest.mark.parametrize("op", GATE_FORMULAS)
def test_gates(
    check: Callable[..., None], provider: str, dtype: torch.dtype, shape: tuple[int, int], op: str
) -> None:
    call = call_of(op, provider, dtype)
    check(GATE_FORMULAS[op], call, random(*shape, dtype=dtype, scale=4))
    check(GATE_FORMULAS[op], call, random(shape[0], shape[1] + 24, dtype=dtype)[:, 8:-16])


@providers
@dtypes
@pytest.mark.parametrize("op", GATE_FORMULAS)
def test_extreme_gates(provider: str, dtype: torch.dtype, op: str) -> None:
    gates = torch.tensor([-torch.inf, torch.inf, torch.nan, -6e4, 6e4, -90, -88, 0, -0.0], device=DEVICE)
    gate_up = torch.cat([gates, torch.ones_like(gates)]).to(dtype)[None].repeat(3, 1)
    out = call_of(op, provider, dtype)(gate_up)
    torch.testing.assert_close(out, GATE_FORMULAS[op](gate_up), equal_nan=True, rtol=1e-2, atol=1e-30)


HEADS = [(32, 8, 128), (32, 8, 64), (9, 3, 64), (12, 12, 80), (4, 1, 96), (2, 2, 256), (5, 1, 6), (1, 1, 2)]


def heads_of(
    num_tokens: int, heads: tuple[int, int, int], dtype: torch.dtype, views: str
) -> tuple[Tensor, ...]:
    """query, key, value as parts of one tensor ("qkv"), shifted by one element ("odd"), or transposed."""
    num_heads, num_kv_heads, head_dim = heads
    counts = [num_heads, num_kv_heads, num_kv_heads]
    if views == "transposed":
        return tuple(random(head_dim, count, num_tokens, dtype=dtype).permute(2, 1, 0) for count in counts)
    width = sum(counts) * head_dim
    flat = random(num_tokens, width + (views == "odd"), dtype=dtype)[:, (views == "odd") :]
    return flat.unflatten(1, (sum(counts), head_dim)).split(counts, dim=1)


def angles_of(num_tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(num_tokens, head_dim // 2, device=DEVICE) * 100
    return angles.cos(), angles.sin()


def caches_of(heads: tuple[int, int, int], dtype: torch.dtype, views: str = "qkv") -> list[Tensor]:
    """Key and value cache of 6 blocks of 16 slots, full of canaries; strides of their own unless "qkv"."""
    _, num_kv_heads, head_dim = heads
    if views == "qkv":
        return list(torch.full((2, 6, 16, num_kv_heads, head_dim), CANARY, device=DEVICE).to(dtype))
    both = torch.full((6, 2, 16, num_kv_heads + 1, head_dim + 1), CANARY, device=DEVICE).to(dtype)
    return [both[:, i, :, :num_kv_heads, :head_dim] for i in range(2)]


def slots_of(num_tokens: int) -> Tensor:
    """All 96 slots in random order for the last tokens; padding rows before them, and every third."""
    slots = torch.full((num_tokens,), -1, dtype=torch.int32, device=DEVICE)
    slots[-96:] = torch.randperm(96, device=DEVICE)[:num_tokens].int()
    slots[1::3] = -1
    return slots


def memory_of(caches: list[Tensor]) -> Tensor:
    """A copy of all that lies under the caches, canaries beside them included."""
    size = caches[0].untyped_storage().size() // caches[0].itemsize
    return torch.as_strided(caches[0], (size,), (1,), 0).clone()


views_of_heads = pytest.mark.parametrize("views", ["qkv", "odd", "transposed"])


@providers
@dtypes
@views_of_heads
@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("heads", [*HEADS, (3, 1, 520)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 37])
def test_norms_of_heads(
    check: Callable[..., None],
    provider: str,
    dtype: torch.dtype,
    views: str,
    zero_centred: bool,
    heads: tuple[int, int, int],
    num_tokens: int,
) -> None:
    query, key, _ = heads_of(num_tokens, heads, dtype, views)
    weights = random(heads[2], dtype=dtype), random(heads[2], dtype=dtype)
    check(qk_norm.qk_norm, call_of("qk_norm", provider, dtype), query, key, *weights, EPS, zero_centred)


@providers
@dtypes
def test_a_head_is_normed_to_the_same_bits_in_any_batch(provider: str, dtype: torch.dtype) -> None:
    query, key, _ = heads_of(300, (16, 8, 128), dtype, "qkv")
    weight, call = random(128, dtype=dtype), call_of("qk_norm", provider, dtype)
    whole = call(query, key, weight, weight, EPS, False)
    one = call(query[:1], key[:1], weight, weight, EPS, False)
    assert all(torch.equal(few, many[:1]) for few, many in zip(one, whole, strict=True))


@providers
@dtypes
@views_of_heads
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 37])
def test_rotary_embedding_has_the_formulas_bits(
    provider: str, dtype: torch.dtype, views: str, heads: tuple[int, int, int], num_tokens: int
) -> None:
    query, key, _ = heads_of(num_tokens, heads, dtype, views)
    arguments = (query, key, *angles_of(num_tokens, heads[2]))
    rotated = call_of("rotary_embedding", provider, dtype)(*arguments)
    for out, expected in zip(rotated, rotary_embedding.rotary_embedding(*arguments), strict=True):
        assert out.is_contiguous()
        assert torch.equal(out, expected)


@providers
@dtypes
@views_of_heads
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 37, 1024, 1031])
def test_rotary_with_the_cache_write_has_the_formulas_bits_and_writes_nothing_else(
    provider: str, dtype: torch.dtype, views: str, heads: tuple[int, int, int], num_tokens: int
) -> None:
    caches = [caches_of(heads, dtype, views) for _ in range(2)]
    inputs = (*heads_of(num_tokens, heads, dtype, views), *angles_of(num_tokens, heads[2]))
    slots = slots_of(num_tokens)
    out = call_of("rotary_and_write_kv_cache", provider, dtype)(*inputs, *caches[0], slots)
    expected = rotary_and_write_kv_cache.rotary_and_write_kv_cache(*inputs, *caches[1], slots)
    assert torch.equal(out, expected)
    assert torch.equal(*map(memory_of, caches))


@providers
@any_dtype
@pytest.mark.parametrize("views", ["qkv", "odd", "transposed"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_write_kv_cache_writes_the_named_slots_and_nothing_else(
    provider: str, dtype: torch.dtype, views: str, heads: tuple[int, int, int]
) -> None:
    caches = [caches_of(heads, dtype, views) for _ in range(2)]
    _, key, value = heads_of(37, heads, dtype, views)
    slots = slots_of(37)
    call_of("write_kv_cache", provider, dtype)(key, value, *caches[0], slots)
    write_kv_cache.write_kv_cache(key, value, *caches[1], slots)
    assert torch.equal(*map(memory_of, caches))


@providers
@any_dtype
@pytest.mark.parametrize("shape", [(40, 16, 8, 128), (40, 32, 3, 64), (40, 1, 1, 3)], ids=str)
@pytest.mark.parametrize("num_pairs", [0, 1, 17])
def test_copy_blocks_copies_the_named_blocks_and_nothing_else(
    provider: str, dtype: torch.dtype, shape: tuple[int, ...], num_pairs: int
) -> None:
    both = random(shape[0], 2, *shape[1:], dtype=dtype, scale=50)
    copies = both.clone()
    mapping = torch.randperm(shape[0], device=DEVICE)[: 2 * num_pairs].view(num_pairs, 2).int()
    call_of("copy_blocks", provider, dtype)(both[:, 0], both[:, 1], mapping)
    copy_blocks.copy_blocks(copies[:, 0], copies[:, 1], mapping)
    assert torch.equal(both, copies)


@providers
def test_caches_without_neighbouring_elements_are_refused(provider: str) -> None:
    cache = torch.zeros(2, 16, 1, 16, device=DEVICE)[..., ::2]
    rows, slots = torch.zeros(1, 1, 8, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ShapeError, match="wanted a contiguous last dimension"):
        call_of("write_kv_cache", provider, rows.dtype)(rows, rows, cache, cache, slots)


@providers
def test_no_tokens_launch_nothing(provider: str) -> None:
    heads, dtype = (4, 2, 64), torch.bfloat16
    query, key, value = heads_of(0, heads, dtype, "qkv")
    angles, caches, slots = angles_of(0, 64), caches_of(heads, dtype), slots_of(0)
    assert call_of("rotary_embedding", provider, dtype)(query, key, *angles)[1].shape == (0, 2, 64)
    weights = random(2, 64, dtype=dtype)
    assert call_of("qk_norm", provider, dtype)(query, key, *weights, EPS, True)[1].shape == (0, 2, 64)
    call_of("write_kv_cache", provider, dtype)(key, value, *caches, slots)
    call = call_of("rotary_and_write_kv_cache", provider, dtype)
    assert call(query, key, value, *angles, *caches, slots).shape == (0, 4, 64)
    assert all((cache == CANARY).all() for cache in caches)
