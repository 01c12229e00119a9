"""The ops of one byte on a GPU: every configuration of the GEMM kernels, and the kernels that quantize."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops._shared.quantized import INT8, LARGEST, num_groups
from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.linear.choices import (
    MAX_SHARED,
    PACED,
    PERSISTENT_CLUSTERS,
    SHARES_PEAKS,
    GemmConfig,
    Site,
    most_stages,
    persistent_stages,
)
from lamina.custom_ops.linear.gemm_config import PERSISTENT_TOKENS
from lamina.custom_ops.linear_w8a8 import _cuda as few
from lamina.custom_ops.quantize_rows.reference import quantize_rows
from lamina.custom_ops.scaled_linear import _cuda as kernel
from lamina.custom_ops.scaled_linear.reference import scaled_linear as formula

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
OPS = torch.ops.lamina
NARROW = [torch.bfloat16, torch.float16]
# x, its scales, weights, their scales, bias
Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


# formats, and columns that share a scale
FORMATS = [pytest.param(FP8, 0, id="fp8"), pytest.param(FP8, 128, id="fp8_block")]
FORMATS.append(pytest.param(INT8, 0, id="int8"))
every_format = pytest.mark.parametrize("kept, group", FORMATS)


def operands(num_tokens: int, n: int, k: int, dtype: torch.dtype, kept: torch.dtype, group: int) -> Operands:
    """Fresh random ones."""
    x = torch.randn(num_tokens, k, device=DEVICE) * torch.rand(num_tokens, 1, device=DEVICE)
    values, x_scale = quantize_rows(x, group, kept)
    largest = LARGEST[kept]
    weight = (torch.randn(n, k, device=DEVICE) * largest / 4).clamp(-largest, largest).to(kept)
    shape = (n, num_groups(k)) if group else (n,)
    scale = (torch.rand(shape, device=DEVICE) + 0.1) / (100 * k**0.5)
    return values, x_scale, weight, scale, torch.randn(n, device=DEVICE).to(dtype)


def absolute(values: Tensor) -> Tensor:
    """Without signs."""
    return values.float().abs().to(values.dtype)


def check(out: Tensor, given: Operands, dtype: torch.dtype) -> None:
    """As good as sums in float32, rounded once: against float64, by the size of the terms."""
    values, x_scale, weight, scale, bias = given
    exact = formula(values, x_scale, weight, scale, bias.double(), torch.float64)
    sizes = absolute(values), x_scale, absolute(weight), scale
    most = formula(*sizes, bias.double().abs(), torch.float64)
    info = torch.finfo(dtype)
    lost = most * 2.0**-21  # in float32
    if values.dtype == FP8:
        # of 32 products the tensor cores keep 12 bits and more beside the largest one
        alone = (_of_largest(part) for part in sizes)
        lost = (most + 2 * formula(*alone, torch.zeros_like(bias.double()), torch.float64)) * 2.0**-12
    allowed = exact.abs() * info.eps / 2 + lost + info.tiny
    excess = (out.double() - exact).abs() / allowed
    assert excess.max() <= 1, (float(excess.max()), int((excess > 1).sum()), int(excess.argmax()))
    assert (out.double() - exact).norm() <= exact.norm() * (info.eps / 2 + 2.0**-11)


def _of_largest(part: Tensor) -> Tensor:
    """Of values the largest of each row's 128 columns, in the first of them; scales as they are."""
    if part.dtype != FP8:
        return part
    alone = torch.zeros_like(part.float())
    for first in range(0, part.shape[1], 128):
        alone[:, first] = part[:, first : first + 128].float().amax(dim=1)
    return alone.to(FP8)


def poisoned(call: Any, out_shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """What a call returns, in memory that held NaN before."""
    torch.full(out_shape, torch.nan, device=DEVICE, dtype=dtype)  # freed at once, and taken again
    result: Tensor = call()
    torch.cuda.synchronize()
    return result


def config_of(warpgroups: int, tokens: int, multicast: int = 1, split_k: int = 1) -> GemmConfig:
    """Three stages, or as many as memory takes."""
    site = Site(kind="linear", num_tokens=tokens, n=4096, k=4096, weights="fp8")
    most = most_stages(site, warpgroups, tokens, split_k, MAX_SHARED)
    assert most is not None
    return GemmConfig(warpgroups, tokens, multicast, split_k, min(3, most))


CONFIGS = [
    *(config_of(warpgroups, tokens) for warpgroups in (1, 2) for tokens in (8, 16, 32, 64, 128)),
    config_of(4, 64),
    *(config_of(2, tokens, 2, 2) for tokens in (16, 32, 64, 128)),
    *(config_of(1, tokens, 1, 8) for tokens in (8, 32, 64)),
    config_of(2, 64, 4, 2),
    *(
        config_of(*kind)._replace(clusters=pace)
        for kind, pace in (((1, 8), 1), ((2, 8, 1, 8), 4), ((2, 32, 2, 2), 8))
    ),
    *(
        GemmConfig(warpgroups, tokens, *cluster, persistent_stages(warpgroups, tokens), clusters)
        for warpgroups, tokens, cluster in itertools.product((1, 2), PERSISTENT_TOKENS, PERSISTENT_CLUSTERS)
        for clusters in (66, 3)
        if warpgroups == 2 or cluster == (1, 2)
    ),
]
# rows, weight rows, columns: more rows than a block takes, weight rows and columns that are no whole tiles
SHAPES = [(1, 4096, 4096), (7, 1000, 2064), (17, 296, 80), (130, 520, 144), (300, 136, 1040)]


@every_format
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_configuration_multiplies(config: GemmConfig, kept: torch.dtype, group: int) -> None:
    for (num_tokens, n, k), dtype in zip(SHAPES, itertools.cycle(NARROW), strict=False):
        given = operands(num_tokens, n, k, dtype, kept, group)
        for bias in (given[4], None):
            result = poisoned(
                lambda bias=bias, given=given, dtype=dtype: kernel.launch(*given[:4], bias, dtype, config),
                (num_tokens, n),
                dtype,
            )
            check(result, (*given[:4], torch.zeros_like(given[4]) if bias is None else bias), dtype)


@every_format
@pytest.mark.parametrize(
    "n, k",
    [(3072, 2048), (2048, 8192), (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (4112, 1040)],
)
def test_the_op_multiplies_any_number_of_rows(n: int, k: int, kept: torch.dtype, group: int) -> None:
    """Around the edges of tiles and of what is chosen for."""
    given = operands(300, n, k, torch.bfloat16, kept, group)
    for num_tokens in (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 127, 128, 129, 192, 193, 255, 256, 257, 300):
        rows = slice(0, num_tokens)
        part = (given[0][rows], given[1][rows], *given[2:])
        result = poisoned(
            lambda part=part: OPS.scaled_linear.default(*part, torch.bfloat16),
            (num_tokens, n),
            torch.bfloat16,
        )
        check(result, part, torch.bfloat16)


@every_format
def test_all_numbers_of_rows_on_a_small_product(kept: torch.dtype, group: int) -> None:
    given = operands(260, 256, 272, torch.bfloat16, kept, group)
    for num_tokens in range(1, 261):
        part = (given[0][:num_tokens], given[1][:num_tokens], *given[2:])
        result = OPS.scaled_linear.default(*part, torch.bfloat16)
        check(result, part, torch.bfloat16)


def test_what_no_kernel_takes_is_multiplied_all_the_same() -> None:
    for num_tokens, n, k, dtype in (3, 40, 24, torch.bfloat16), (5, 33, 64, torch.float32):
        for kept in (FP8, INT8):
            given = operands(num_tokens, n, k, dtype, kept, 0)
            check(OPS.scaled_linear.default(*given, dtype), given, dtype)


@every_format
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 40, 300])
def test_linear_w8a8_quantizes_and_multiplies(num_tokens: int, kept: torch.dtype, group: int) -> None:
    for n, k in (4096, 4096), (520, 272), (33, 20):
        *_, weight, scale, bias = operands(1, n, k, torch.bfloat16, kept, group)
        x = torch.randn(num_tokens, k, device=DEVICE, dtype=torch.bfloat16)
        values, x_scale = quantize_rows(x, group, kept)
        result = OPS.linear_w8a8.default(x, weight, scale, bias)
        check(result, (values, x_scale, weight, scale, bias), torch.bfloat16)


FEW_CONFIGS = [config_of(warpgroups, 8, 1, split) for warpgroups in (1, 2) for split in (1, 2, 4, 8)]


FEW_CONFIGS += [config._replace(clusters=SHARES_PEAKS) for config in FEW_CONFIGS if config.split_k > 1]
FEW_CONFIGS += [config._replace(clusters=config.clusters | PACED) for config in FEW_CONFIGS[::3]]


@every_format
@pytest.mark.parametrize("config", FEW_CONFIGS, ids=str)
def test_few_rows_are_quantized_while_weights_stream_in(
    config: GemmConfig, kept: torch.dtype, group: int
) -> None:
    if group and config.clusters & SHARES_PEAKS:
        pytest.skip("every block has its groups whole")
    for (n, k), num_tokens in itertools.product(
        [(4096, 4096), (1000, 14336), (136, 80), (72, 272)], (1, 2, 5, 8)
    ):
        *_, weight, scale, bias = operands(1, n, k, torch.bfloat16, kept, group)
        wide = torch.full((num_tokens, k + 8), torch.nan, device=DEVICE, dtype=torch.bfloat16)
        x = wide[:, :k]
        x.copy_(torch.randn(num_tokens, k, device=DEVICE))
        values, x_scale = quantize_rows(x, group, kept)
        result = poisoned(
            lambda x=x, weight=weight, scale=scale, bias=bias: few.launch(x, weight, scale, bias, config),
            (num_tokens, n),
            torch.bfloat16,
        )
        check(result, (values, x_scale, weight, scale, bias), torch.bfloat16)
        if kept == FP8:  # of whole numbers the other kernel sums up all columns before it rounds
            apart = kernel.launch(
                values, x_scale, weight, scale, bias, torch.bfloat16, config._replace(clusters=0)
            )
            assert torch.equal(result, apart)


def bits(values: Tensor) -> Tensor:
    """The bytes of FP8 values, and of other ones the values."""
    return values.view(torch.uint8) if values.dtype == FP8 else values


def same(results: Any, wanted: Any) -> None:
    """Whether all results have the same bits, values and scales."""
    for result, right in zip(results, wanted, strict=True):
        assert torch.equal(bits(result), bits(right))


@pytest.mark.parametrize("dtype", NARROW)
@every_format
@pytest.mark.parametrize("columns", [8, 128, 136, 2048, 4096, 14336, 20480, 40960])
def test_quantized_rows_have_the_formulas_bits(
    dtype: torch.dtype, kept: torch.dtype, group: int, columns: int
) -> None:
    for num_tokens in (1, 3, 257):
        wide = torch.full((num_tokens, columns + 8), torch.nan, device=DEVICE, dtype=dtype)
        x = wide[:, :columns]
        x.copy_(torch.randn(num_tokens, columns, device=DEVICE) * 3)
        x[0, -1] = 0 if num_tokens > 1 else 77
        same(OPS.quantize_rows.default(x, group, kept), quantize_rows(x, group, kept))


@pytest.mark.parametrize("dtype", NARROW)
@every_format
@pytest.mark.parametrize("columns", [64, 2048, 4096, 8192, 16384])
def test_quantized_norms_have_the_bits_of_the_norm_quantized(
    dtype: torch.dtype, kept: torch.dtype, group: int, columns: int
) -> None:
    for num_tokens, zero_centred, unrounded in itertools.product((1, 130), (False, True), (False, True)):
        x, residual = (torch.randn(num_tokens, columns, device=DEVICE).to(dtype) for _ in range(2))
        weight = torch.randn(columns, device=DEVICE).to(dtype)
        both = OPS.add_zero_centred_rms_norm if zero_centred else OPS.add_rms_norm
        alone = OPS.zero_centred_rms_norm if zero_centred else OPS.rms_norm
        normed, total = both.default(x, residual, weight, 1e-5, unrounded)
        given = x, residual, weight, 1e-5, group, kept, zero_centred, unrounded
        same(OPS.add_rms_norm_quantized.default(*given), (*quantize_rows(normed, group, kept), total))
        normed = alone.default(x, weight, 1e-5)
        both = OPS.rms_norm_quantized.default(x, weight, 1e-5, group, kept, zero_centred)
        same(both, quantize_rows(normed, group, kept))


@pytest.mark.parametrize("dtype", NARROW)
@every_format
@pytest.mark.parametrize("columns", [64, 1000, 8192, 14336])
def test_quantized_gates_have_the_bits_of_the_gate_quantized(
    dtype: torch.dtype, kept: torch.dtype, group: int, columns: int
) -> None:
    for num_tokens, gelu in itertools.product((1, 5, 130), (False, True)):
        gate_up = torch.randn(num_tokens, 2 * columns, device=DEVICE).to(dtype)
        gate = OPS.gelu_and_mul if gelu else OPS.silu_and_mul
        wanted = quantize_rows(gate.default(gate_up), group, kept)
        same(OPS.act_and_mul_quantized.default(gate_up, gelu, group, kept), wanted)


@every_format
def test_what_is_no_number_stays_in_its_group(kept: torch.dtype, group: int) -> None:
    x = torch.randn(4, 4096, device=DEVICE).bfloat16()
    x[1, 3], x[2, 4000] = torch.nan, torch.inf
    values, scale = OPS.quantize_rows.default(x, group, kept)
    right, right_scale = quantize_rows(x, group, kept)
    same([values.float().nan_to_num(nan=1e9)], [right.float().nan_to_num(nan=1e9)])
    torch.testing.assert_close(scale, right_scale, equal_nan=True)


@every_format
@pytest.mark.parametrize("tokens", PERSISTENT_TOKENS)
@pytest.mark.parametrize("cluster", PERSISTENT_CLUSTERS)
def test_persistent_kernels_take_many_rows(
    tokens: int, cluster: tuple[int, int], kept: torch.dtype, group: int
) -> None:
    """Of several waves of tiles, the last one short."""
    config = GemmConfig(2, tokens, *cluster, persistent_stages(2, tokens), 66)
    for num_tokens, n, k in (1030, 4096, 4096), (2048, 1000, 2064), (5000, 136, 1040):
        given = operands(num_tokens, n, k, torch.bfloat16, kept, group)
        result = poisoned(
            lambda given=given: kernel.launch(*given, torch.bfloat16, config), (num_tokens, n), torch.bfloat16
        )
        check(result, given, torch.bfloat16)


@pytest.mark.parametrize("op", ["quantize_rows", "scaled_linear"])
def test_the_triton_twins(op: str) -> None:
    for (kept, group), num_tokens in itertools.product(((FP8, 0), (FP8, 128), (INT8, 0)), (1, 5, 70)):
        given = operands(num_tokens, 200, 400, torch.bfloat16, kept, group)
        if op == "scaled_linear":
            call = select(op, device=DEVICE, dtype=kept, provider="triton").call
            check(call(*given, torch.bfloat16), given, torch.bfloat16)
        else:
            call = select(op, device=DEVICE, dtype=torch.bfloat16, provider="triton").call
            x = torch.randn(num_tokens, 400, device=DEVICE).bfloat16()
            same(call(x, group, kept), quantize_rows(x, group, kept))


@pytest.mark.parametrize("kept", [FP8, INT8])
def test_a_captured_chain_replays_with_new_values(kept: torch.dtype) -> None:
    """Kernels that begin before the one ahead has ended read what it wrote in this replay, not the last."""
    n = k = 4096
    _, _, weight, scale, _ = operands(1, n, k, torch.bfloat16, kept, 0)
    norm_weight = torch.ones(k, device=DEVICE, dtype=torch.bfloat16)
    x, residual = (torch.randn(8, k, device=DEVICE).bfloat16() for _ in range(2))

    def chain() -> tuple[Tensor, Tensor]:
        out, total = x, residual
        for _ in range(6):
            values, x_scale, total = OPS.add_rms_norm_quantized.default(
                out, total, norm_weight, 1e-5, 0, kept
            )
            out = OPS.scaled_linear.default(values, x_scale, weight, scale, None, torch.bfloat16)
            out = OPS.linear_w8a8.default(out, weight, scale)
        return out, total

    check_replays(chain, x, residual)


def check_replays(chain: Callable[[], tuple[Tensor, Tensor]], *inputs: Tensor) -> None:
    """A captured chain gives, of every input that is drawn anew, what it gives launch by launch."""
    chain()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        results = chain()
    for _ in range(20):
        for part in inputs:
            part.normal_()
        graph.replay()
        torch.cuda.synchronize()
        replayed = [result.clone() for result in results]
        for one, other in zip(replayed, chain(), strict=True):
            assert torch.equal(one, other)
