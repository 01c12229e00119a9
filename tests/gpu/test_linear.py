"""The GEMM kernels behind lamina::linear and lamina::add_rms_norm_linear, in every configuration."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lamina.custom_ops.add_rms_norm_linear import reference as fused_formula
from lamina.custom_ops.linear import _cuda as plain
from lamina.custom_ops.linear import reference as formula
from lamina.custom_ops.linear.choices import (
    MAX_SHARED,
    PERSISTENT_CLUSTERS,
    Entry,
    GemmConfig,
    Site,
    adopt,
    bucket_of,
    device_name_of,
    most_stages,
    persistent_stages,
)
from lamina.custom_ops.linear.gemm_config import PERSISTENT_TOKENS
from lamina.custom_ops.linear_silu_and_mul import _cuda as with_gate

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
EPS = 1e-5
# rows, weight rows, columns: odd weight rows, columns that are no whole tile, more rows than a block takes
SHAPES = [
    (1, 4096, 4096),
    (7, 1001, 2056),
    (17, 300, 72),
    (300, 131, 1032),
]
WIDEST = 4096  # columns of the shapes


def config_of(warpgroups: int, tokens: int, multicast: int = 1, split_k: int = 1) -> GemmConfig:
    """Three stages, or as many as memory takes."""
    site = Site(kind="linear", num_tokens=tokens, n=4096, k=WIDEST)
    most = most_stages(site, warpgroups, tokens, split_k, MAX_SHARED)
    assert most is not None
    return GemmConfig(warpgroups, tokens, multicast, split_k, min(3, most))


CONFIGS = [
    *(config_of(warpgroups, tokens) for warpgroups in (1, 2) for tokens in (8, 16, 32, 64, 128, 256)),
    *(config_of(4, tokens) for tokens in (64, 128)),
    *(config_of(2, tokens, 2, 2) for tokens in (16, 32, 64, 128)),
    *(config_of(1, tokens, 1, 8) for tokens in (8, 32, 64)),
    *(config_of(2, tokens, 4, 2) for tokens in (64, 256)),
    GemmConfig(1, 8, 1, 1, 11),
    *(
        config_of(*kind)._replace(clusters=pace)
        for kind, pace in (((1, 8), 1), ((1, 8, 1, 8), 4), ((2, 32, 2, 2), 8))
    ),
]


def persistent(warpgroups: int, tokens: int, clusters: int, cluster: tuple[int, int] = (1, 2)) -> GemmConfig:
    """A configuration of the persistent kernel."""
    return GemmConfig(warpgroups, tokens, *cluster, persistent_stages(warpgroups, tokens), clusters)


PERSISTENT = [
    persistent(warpgroups, tokens, clusters, cluster)
    for warpgroups, tokens, cluster in itertools.product((1, 2), PERSISTENT_TOKENS, PERSISTENT_CLUSTERS)
    for clusters in (66, 3, 1)
    if warpgroups == 2 or cluster == (1, 2)
]
# weight rows and columns: less than a tile, tiles that no block has alone, more than all blocks, no whole one
PERSISTENT_SHAPES = [(16, 8), (512, 1032), (2576, 2056), (11 * 128 + 48, 520)]


@pytest.fixture(autouse=True)
def gpu() -> None:
    """Skip where the kernel has no instructions for the GPU."""
    if torch.cuda.get_device_capability() != plain.HOPPER:
        pytest.skip("the kernel is for compute capability 9.0")


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: GemmConfig,
    *,
    call: Callable[..., Tensor] = plain.launch,
) -> Tensor:
    """The kernel's result in memory that was NaN, so that what it leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    try:
        return call(x, weight, bias, config)
    finally:
        torch.use_deterministic_algorithms(False)


def rows(num_rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Random rows in the middle of a tensor of NaN, further apart than they are long."""
    around = torch.full((num_rows + 8, columns + 16), torch.nan, device=DEVICE, dtype=dtype)
    inside = around[4:-4, 8:-8]
    inside.normal_()
    return inside


def weights(n: int, k: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(n, k, device=DEVICE) / k**0.5).to(dtype)


def vector(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, device=DEVICE).to(dtype)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(
    "shape,dtype", [*((shape, torch.bfloat16) for shape in SHAPES), (SHAPES[1], torch.float16)], ids=str
)
def test_every_configuration_errs_at_most_twice_as_much_as_the_library(
    assert_close_to_reference: Callable[..., None],
    dtype: torch.dtype,
    config: GemmConfig,
    shape: tuple[int, int, int],
) -> None:
    num_rows, n, k = shape
    x, weight, bias = rows(num_rows, k, dtype), weights(n, k, dtype), vector(n, dtype)
    for given in (None, bias):
        out = launch(x, weight, given, config)
        wide = None if given is None else given.double()
        exact, naive = formula.linear(x.double(), weight.double(), wide), formula.linear(x, weight, given)
        assert_close_to_reference(out, exact, naive)


@pytest.mark.parametrize("config", PERSISTENT, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_persistent_kernels_err_at_most_twice_as_much_as_the_library(
    assert_close_to_reference: Callable[..., None], dtype: torch.dtype, config: GemmConfig
) -> None:
    for n, k in PERSISTENT_SHAPES:
        weight, bias = weights(n, k, dtype), vector(n, dtype)
        for num_rows in (1, config.tile_tokens // 2 + 1, config.tile_tokens, 150, 256):
            x = rows(num_rows, k, dtype)
            exact = formula.linear(x.double(), weight.double(), bias.double())
            naive = formula.linear(x, weight, bias)
            assert_close_to_reference(launch(x, weight, bias, config), exact, naive)


@pytest.mark.parametrize("config", PERSISTENT, ids=str)
def test_the_persistent_kernel_before_a_gate(
    assert_close_to_reference: Callable[..., None], config: GemmConfig
) -> None:
    dtype = torch.bfloat16
    for (n, k), num_rows in itertools.product(PERSISTENT_SHAPES, (config.tile_tokens - 3, 512, 1020, 2500)):
        x, weight, bias = rows(num_rows, k, dtype), weights(n, k, dtype), vector(n, dtype)
        out = launch(x, weight, bias, config, call=with_gate.launch)
        exact, naive = (
            fused_formula.gate.silu_and_mul(formula.linear(x.to(wide), weight.to(wide), bias.to(wide)))
            for wide in (torch.float64, dtype)
        )
        assert_close_to_reference(out, exact, naive)


@pytest.mark.parametrize("config", [config for config in CONFIGS if config.warpgroups > 1], ids=str)
def test_every_configuration_before_a_gate(
    assert_close_to_reference: Callable[..., None], config: GemmConfig
) -> None:
    dtype = torch.bfloat16
    x, weight = rows(70, 520, dtype), weights(2 * 333, 520, dtype)
    out = launch(x, weight, None, config, call=with_gate.launch)
    exact, naive = (
        fused_formula.gate.silu_and_mul(formula.linear(x.to(wide), weight.to(wide)))
        for wide in (torch.float64, dtype)
    )
    assert_close_to_reference(out, exact, naive)


@pytest.mark.parametrize("config", [*CONFIGS, *PERSISTENT], ids=str)
def test_a_row_has_the_same_bits_whatever_its_neighbours_hold(config: GemmConfig) -> None:
    x, weight = rows(9, 1032, torch.bfloat16), weights(200, 1032, torch.bfloat16)
    out = launch(x, weight, None, config)
    poisoned = x.clone()
    poisoned[1:] = torch.nan
    assert torch.equal(launch(poisoned, weight, None, config)[0], out[0])
    assert torch.equal(launch(x[:1], weight, None, config)[0], out[0])
    assert all(torch.equal(launch(x, weight, None, config), out) for _ in range(5))


def stream_all(num_rows: int, up: tuple[int, int], down: tuple[int, int], *, is_persistent: bool) -> None:
    """Let the kernel serve a gated GEMM and a plain one, as if it had been measured to be faster."""
    bucket = bucket_of(num_rows)
    assert bucket is not None
    tokens = max(8, bucket)
    gated, alone = (
        Site(kind=kind, num_tokens=bucket, n=n, k=k) for kind, (n, k) in [("gated", up), ("linear", down)]
    )
    configs = {gated: config_of(2, tokens), alone: config_of(1, tokens, 1, 4)}
    if is_persistent:
        configs = {gated: persistent(2, tokens, 8), alone: persistent(1, tokens, 64)}
    known = [
        Entry(site=site, kernel=config, microseconds=1.0, otherwise=2.0) for site, config in configs.items()
    ]
    adopt(device_name_of(DEVICE, torch.bfloat16), known)


@pytest.mark.parametrize(
    "num_rows,is_persistent", [(1, False), (8, False), (32, False), (200, False), (100, True), (200, True)]
)
def test_layers_in_a_graph_give_what_they_give_one_by_one(num_rows: int, is_persistent: bool) -> None:
    """In a graph each kernel begins before the one ahead has ended."""
    ops, k = torch.ops.lamina, 1024
    norm_weight = vector(k, torch.bfloat16)
    stream_all(num_rows, (4 * k, k), (k, 2 * k), is_persistent=is_persistent)
    layers = [(weights(4 * k, k, torch.bfloat16), weights(k, 2 * k, torch.bfloat16)) for _ in range(6)]

    def forward(x: Tensor) -> Tensor:
        residual = x
        for up, down in layers:
            gated, residual = ops.add_rms_norm_linear.default(x, residual, norm_weight, EPS, up, None, True)
            x = ops.linear.default(gated, down)
            x = ops.silu_and_mul.default(torch.cat([x, residual], dim=1))
        return ops.rms_norm.default(x, norm_weight, EPS)

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


def test_what_the_kernel_does_not_take_goes_to_the_library() -> None:
    call, dtype = plain.load(), torch.bfloat16
    for x, weight in [
        (vector(3 * 60, dtype).view(3, 60), vector(8 * 60, dtype).view(8, 60)),  # rows of 120 bytes
        (vector(3 * 65, dtype).view(3, 65)[:, 1:], weights(8, 64, dtype)),  # an odd start
        (weights(3, 64, dtype), weights(64, 8, dtype).T),  # columns, not rows
        (weights(0, 64, dtype), weights(8, 64, dtype)),
        (weights(1000, 64, dtype), weights(8, 64, dtype)),
    ]:
        assert torch.equal(call(x, weight), formula.linear(x, weight))
