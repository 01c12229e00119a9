"""The CUDA kernels of lamina::linear_w4a16, four and eight bits, in every configuration, and Triton's."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.linear._cuda import HOPPER
from lamina.custom_ops.linear.choices import MAX_SHARED, GemmConfig
from lamina.custom_ops.linear_w4a16 import _cuda, layout
from lamina.custom_ops.linear_w4a16.configs import (
    MMA,
    PACED,
    PLAIN,
    PLAIN_TOKENS,
    WARPGROUPS,
    most_stages,
    num_steps,
)
from lamina.custom_ops.linear_w4a16.op import num_groups
from lamina.custom_ops.linear_w4a16.reference import dequantize
from lamina.custom_ops.silu_and_mul import reference as gate

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SUM_ERROR = 4e-6  # of a sum in float32 by WGMMA, by the sum of its terms' sizes
GROUPS = (32, 64, 128, 256, -1)


class Case(NamedTuple):
    """Arguments of the kernel: what it reads is shuffled, `rows` are the same parts by rows."""

    x: Tensor
    weight: Tensor
    scale: Tensor
    zero: Tensor | None
    bias: Tensor | None
    group: int
    dense: Tensor  # [n, k] of x's dtype, by the formula


@pytest.fixture(autouse=True)
def gpu() -> None:
    """Skip where the kernel has no instructions for the GPU."""
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("the kernel is for compute capability 9.0")


every_width = pytest.mark.parametrize("bits", [4, 8])


def numbers(n: int, k: int, bits: int) -> Tensor:
    """Random weights, as the op takes them."""
    weight = torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8, device=DEVICE)
    return weight if bits == 4 else weight.view(torch.int8)


def make(
    num_rows: int,
    n: int,
    k: int,
    group: int = 128,
    *,
    zero: bool = True,
    bias: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    bits: int = 4,
) -> Case:
    """Fresh random operands; x amid a tensor of NaN, its rows further apart than they are long."""
    around = torch.full((num_rows + 8, k + 16), torch.nan, device=DEVICE, dtype=dtype)
    x = around[4:-4, 8:-8]
    x.normal_()
    weight = numbers(n, k, bits)
    shape = n, num_groups(k, group)
    scale = ((torch.rand(shape, device=DEVICE) + 0.1) / (4 * (bits - 3) ** 2 * k**0.5)).to(dtype)
    zeros = (torch.randn(shape, device=DEVICE) / k**0.5).to(dtype) if zero else None
    biases = torch.randn(n, device=DEVICE).to(dtype) if bias else None
    dense = dequantize(weight, scale, zeros, group)
    shuffled = None if zeros is None else layout.shuffle_groups(zeros)
    return Case(x, layout.shuffle(weight), layout.shuffle_groups(scale), shuffled, biases, group, dense)


def poisoned(call: Callable[[], Tensor]) -> Tensor:
    """The result in memory that was NaN, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)


def check(out: Tensor, case: Case, *, gated: bool = False) -> None:
    """Each result is rounded once from a sum as good as those of float32; behind a gate, close to such."""
    x, dense = case.x.double(), case.dense.double()
    exact, sizes = x @ dense.T, x.abs() @ dense.abs().T
    if case.bias is not None:
        exact, sizes = exact + case.bias.double(), sizes + case.bias.double().abs()
    eps = torch.finfo(out.dtype).eps
    if gated:
        right = gate.silu_and_mul(exact.to(out.dtype)).double()
        near, up = exact.chunk(2, dim=-1)
        allowed = 4 * eps * (near.abs() + 1) * (up.abs() + 1) + SUM_ERROR * sizes.sum(dim=-1, keepdim=True)
        assert ((out.double() - right).abs() <= allowed).all()
        assert ((out.double() - right).abs() <= eps * right.abs()).double().mean() > 0.98
        return
    allowed = exact.abs() * eps / 2 + sizes * SUM_ERROR
    wrong = (out.double() - exact).abs() > allowed
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}, first at {wrong.nonzero()[0].tolist()}"


def config_of(
    warpgroups: int, tokens: int, k: int, multicast: int = 1, split_k: int = 1, bits: int = 4
) -> GemmConfig:
    """Three stages, or as many as memory takes, for any group."""
    most = most_stages(warpgroups, tokens, k, 32, split_k, MAX_SHARED, bits=bits)
    assert most is not None
    return GemmConfig(warpgroups, tokens, multicast, split_k, min(3, most))


SHAPES = {  # multicast, split_k
    8: ((1, 1), (1, 2), (1, 4), (1, 8)),
    16: ((1, 1), (2, 2), (1, 8)),
    32: ((1, 1), (2, 1), (2, 4), (1, 8)),
    64: ((1, 1), (2, 2), (4, 2), (1, 8)),
    128: ((1, 1), (2, 2), (1, 4)),
}
CONFIGS = [
    (warpgroups, tokens, *cluster)
    for warpgroups, sizes in WARPGROUPS.items()
    for tokens in sizes
    for cluster in SHAPES[tokens]
]
BY_MMA = [
    (groups, tokens, *cluster) for groups in (1, 2) for tokens in (8, 16, 32) for cluster in SHAPES[tokens]
]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=str)


@every_width
@every_config
def test_every_configuration_gives_the_product_rounded_once(
    config: tuple[int, int, int, int], bits: int
) -> None:
    """Of one tile and many; columns that are no whole stage, or fewer than blocks share; no whole block."""
    warpgroups, tokens, *cluster = config
    for (n, k), group, zero in zip(
        [(64, 64), (320, 576), (448, 1088), (192, 4096), (1088, 256)], GROUPS, [0, 1, 0, 1, 1], strict=True
    ):
        for num_rows in {1, tokens // 2 + 1, tokens, tokens + 3}:
            case = make(num_rows, n, k, group, zero=bool(zero), bias=bool(num_rows % 2), bits=bits)
            which = config_of(warpgroups, tokens, k, *cluster, bits=bits)
            check(poisoned(lambda c=case, w=which: _cuda.launch(*c[:6], w)), case)


@every_width
@pytest.mark.parametrize("config", BY_MMA, ids=str)
def test_products_by_warps(config: tuple[int, int, int, int], bits: int) -> None:
    """Every group and dtype, gated too."""
    warpgroups, tokens, *cluster = config
    for group, dtype in itertools.product(GROUPS, (torch.bfloat16, torch.float16)):
        for k, gated in ((1088, False), (320, warpgroups > 1)):
            case = make(tokens - 1, 384, k, group, zero=gated, dtype=dtype, bits=bits)
            which = config_of(warpgroups, tokens, k, *cluster, bits=bits)._replace(clusters=1)
            check(
                poisoned(lambda c=case, w=which, g=gated: _cuda.launch(*c[:6], w, gated=g)), case, gated=gated
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_for_plain_groups_has_the_bits_of_that_for_any(dtype: torch.dtype) -> None:
    """And with zero points, of which no site tells, the other is taken; at a pace all the same."""
    by_wgmma = [(*config, 0) for config in CONFIGS if config[1] in PLAIN_TOKENS[0]]
    for warpgroups, tokens, *cluster, way in (*((*each, MMA) for each in BY_MMA), *by_wgmma):
        for (k, gated), zero in itertools.product(((1088, False), (4096, warpgroups > 1)), (False, True)):
            case = make(tokens - 1, 384, k, 128, zero=zero, dtype=dtype)
            which = config_of(warpgroups, tokens, k, *cluster)._replace(clusters=way)
            wanted = poisoned(lambda c=case, w=which, g=gated: _cuda.launch(*c[:6], w, gated=g))
            check(wanted, case, gated=gated)
            which = which._replace(clusters=way | PLAIN)
            result = poisoned(lambda c=case, w=which, g=gated: _cuda.launch(*c[:6], w, gated=g))
            assert torch.equal(result, wanted), (which, k, gated, zero)
            which = which._replace(clusters=which.clusters | PACED)
            result = poisoned(lambda c=case, w=which, g=gated: _cuda.launch(*c[:6], w, gated=g))
            assert torch.equal(result, wanted), (which, k, gated, zero)


@pytest.mark.parametrize("way, tokens", [(MMA, 8), (MMA, 16), (MMA, 32), (0, 32), (0, 64)])
def test_plain_weights_of_every_scale_and_number_have_the_bits_of_the_formula(way: int, tokens: int) -> None:
    """Each row of x picks a column, so that results are the weights themselves."""
    n, k = 2048, 256
    scale = torch.arange(n * 2, device=DEVICE).to(torch.int16) * 16 + 5  # of sizes and signs of every kind
    scale = scale.view(torch.bfloat16).view(n, 2)
    scale = torch.where((scale.abs() < 2.0**20) & (scale.abs() > 2.0**-80), scale, 0.0)
    weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)
    dense = dequantize(weight, scale, None, 128)
    parts = layout.shuffle(weight), layout.shuffle_groups(scale), None, None, 128
    which = config_of(1, tokens, k)._replace(clusters=way | PLAIN)
    x = torch.eye(k, device=DEVICE, dtype=torch.bfloat16)
    for rows, wanted in zip(x.split(tokens), dense.T.split(tokens), strict=True):
        assert torch.equal(poisoned(lambda r=rows: _cuda.launch(r, *parts, which)), wanted)


@every_width
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_group_and_dtype(dtype: torch.dtype, zero: bool, group: int, bits: int) -> None:
    for tokens, k in ((8, 1216), (32, 1216), (64, 512)):
        case = make(tokens - 1, 256, k, group, zero=zero, dtype=dtype, bits=bits)
        for split_k in (1, 2):
            which = config_of(2, tokens, k, 1, split_k, bits)
            check(poisoned(lambda c=case, w=which: _cuda.launch(*c[:6], w)), case)


@every_width
@pytest.mark.parametrize("config", [config for config in CONFIGS if config[0] > 1], ids=str)
def test_every_configuration_before_a_gate(config: tuple[int, int, int, int], bits: int) -> None:
    warpgroups, tokens, *cluster = config
    for n, k in ((128, 320), (1408, 1024)):
        case = make(tokens - 1, n, k, 64, bits=bits)
        which = config_of(warpgroups, tokens, k, *cluster, bits=bits)
        check(poisoned(lambda c=case, w=which: _cuda.launch(*c[:6], w, gated=True)), case, gated=True)


@every_width
@pytest.mark.parametrize(
    "n,k", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (3072, 2048), (2048, 8192)]
)
def test_projections_of_1b_and_8b_by_the_configurations_that_auto_takes(n: int, k: int, bits: int) -> None:
    call = select("linear_w4a16", device=DEVICE, dtype=torch.bfloat16, provider="cuda").call
    for num_rows in (1, 2, 7, 8, 9, 16, 17, 31, 33, 64, 65, 130, 257):
        group, flags = 128 if bits == 4 else 32, {"zero": num_rows % 2 == 0, "bias": num_rows % 3 == 0}
        case = make(num_rows, n, k, group, **flags, bits=bits)
        if num_rows <= 256:
            check(poisoned(lambda c=case: call(*c[:6], True)), case)
        else:  # the library's sums are its own
            check_library(call(*case[:6], True), case)
        if n == 28672 and num_rows <= 256:
            check(poisoned(lambda c=case: call(*c[:6], True, True)), case, gated=True)


def check_library(out: Tensor, case: Case) -> None:
    exact = case.x.double() @ case.dense.double().T
    if case.bias is not None:
        exact += case.bias.double()
    assert ((out.double() - exact).abs() / exact.std()).max() < 0.02


@every_width
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_are_written_out_to_the_bit(dtype: torch.dtype, group: int, bits: int) -> None:
    for (n, k), zero in itertools.product([(64, 64), (320, 576), (4096, 4096)], (False, True)):
        case = make(1, n, k, group, zero=zero, dtype=dtype, bits=bits)
        out = poisoned(lambda c=case: _cuda.write_out(c.weight, c.scale, c.zero, c.group))
        differs = (out != case.dense).double().mean()
        assert differs == 0, f"{float(differs):.2%} of the weights"


@every_config
def test_a_row_has_the_same_bits_whatever_its_neighbours_hold(config: tuple[int, int, int, int]) -> None:
    warpgroups, tokens, *cluster = config
    case, which = make(9, 192, 1088), config_of(warpgroups, tokens, 1088, *cluster)
    out = _cuda.launch(*case[:6], which)
    held = case.x.clone()
    held[1:] = torch.nan
    assert torch.equal(_cuda.launch(held, *case[1:6], which)[0], out[0])
    assert torch.equal(_cuda.launch(case.x[:1], *case[1:6], which)[0], out[0])
    assert all(torch.equal(_cuda.launch(*case[:6], which), out) for _ in range(5))


def test_as_many_stages_as_there_are_and_more_than_are_needed() -> None:
    for stages in (2, 3, num_steps(8, 4096, 1), 24):
        case = make(5, 256, 4096)
        check(poisoned(lambda c=case, s=stages: _cuda.launch(*c[:6], GemmConfig(2, 8, 1, 1, s))), case)


@pytest.mark.parametrize("num_rows", [1, 8, 32, 64, 130, 300])
def test_layers_in_a_graph_give_what_they_give_one_by_one(num_rows: int) -> None:
    """In a graph each kernel begins before the one ahead has ended."""
    k, call = 1024, torch.ops.lamina.linear_w4a16.default
    layers = [(make(1, 4 * k, k), make(1, k, 2 * k)) for _ in range(6)]
    norm_weight = torch.ones(k, device=DEVICE, dtype=torch.bfloat16)

    def forward(x: Tensor) -> Tensor:
        residual = x
        for up, down in layers:
            normed, residual = torch.ops.lamina.add_rms_norm.default(x, residual, norm_weight, 1e-5)
            gated = call(normed, *up[1:6], True, True)
            x = call(gated, *down[1:6], True)
        return torch.ops.lamina.rms_norm.default(x, norm_weight, 1e-5)

    x = torch.randn(num_rows, k, device=DEVICE).bfloat16()
    forward(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(x)
    for _ in range(20):
        x.normal_()
        graph.replay()
        assert torch.equal(out, forward(x))
        assert out.isfinite().all()


@every_width
@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("provider", ["cuda", "triton"])
def test_weights_by_rows_of_any_size_and_group(provider: str, num_rows: int, bits: int) -> None:
    call = select("linear_w4a16", device=DEVICE, dtype=torch.bfloat16, provider=provider).call
    for n, k, group in ((70, 100, 6), (33, 64, -1), (128, 192, 96)):
        weight = numbers(n, k, bits)
        scale, zero = (torch.randn(2, n, num_groups(k, group), device=DEVICE) / (bits - 3) ** 2).bfloat16()
        x, bias = torch.randn(num_rows, k, device=DEVICE).bfloat16(), torch.randn(n, device=DEVICE).bfloat16()
        dense = dequantize(weight, scale, zero, group)
        case = Case(x, weight, scale, zero, bias, group, dense)
        for out in (call(*case[:6]), call(*case[:6], False, False)):
            exact = x.double() @ dense.double().T + bias.double()
            assert ((out.double() - exact).abs() <= 0.02 * exact.abs() + 0.05).all()


@every_width
def test_shuffled_weights_that_the_kernel_does_not_take_are_served_all_the_same(bits: int) -> None:
    providers = "cuda", "cuda", "cuda", "triton"
    cases = (96, False), (96, True), (128, True), (128, False)
    for provider, (group, gated) in zip(providers, cases, strict=True):
        call = select("linear_w4a16", device=DEVICE, dtype=torch.bfloat16, provider=provider).call
        case = make(5, 192, 576, group, bits=bits)  # 192 rows are no whole tiles of gate and up
        out = call(*case[:6], True, gated)
        exact = case.x.double() @ case.dense.double().T
        exact = exact + (0 if case.bias is None else case.bias.double())
        right = gate.silu_and_mul(exact) if gated else exact
        assert ((out.double() - right).abs() <= 0.03 * right.abs() + 0.03).all()
    call, odd = torch.ops.lamina.linear_w4a16.default, make(5, 128, 576, bits=bits)
    x = torch.randn(5, 577, device=DEVICE).bfloat16()[:, 1:]  # rows at no multiple of 16 bytes
    check(call(x, *odd[1:6], True), odd._replace(x=x))


def test_opcheck() -> None:
    for gated, bits in ((False, 4), (True, 4), (False, 8), (True, 8)):
        case = make(5, 128, 192, 64, bits=bits)
        torch.library.opcheck(torch.ops.lamina.linear_w4a16.default, (*case[:6], True, gated))
