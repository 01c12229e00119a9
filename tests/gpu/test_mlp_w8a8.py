"""The kernels of lamina::mlp_w8a8 on a GPU: every configuration, to the bit what the ops apart give."""

import itertools

import pytest
import torch
from torch import Tensor

from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops.linear import choices
from lamina.custom_ops.linear.choices import MAX_SHARED, SHARES_PEAKS, Entry, GemmConfig, Site, most_stages
from lamina.custom_ops.linear_w8a8 import _cuda as few
from lamina.custom_ops.mlp_w8a8 import _composed
from lamina.custom_ops.mlp_w8a8 import _cuda as kernel
from lamina.custom_ops.scaled_linear import _cuda as scaled
from lamina.custom_ops.silu_and_mul.reference import silu_and_mul

from .test_linear_w8a8 import DEVICE, NARROW, OPS, check, check_replays, every_format, operands, poisoned

pytestmark = pytest.mark.gpu

CONFIGS = [
    *((2, tokens, 1, split) for tokens in (8, 16, 32, 64) for split in (1, 2, 8)),
    *((2, tokens, 2, 2) for tokens in (16, 32, 64)),
    *((4, 64, 1, 1), (4, 64, 4, 1)),
]
SHAPES = [(28672, 4096), (1008, 2064), (144, 80)]  # of gate and up


def config_of(warpgroups: int, tokens: int, multicast: int, split_k: int) -> GemmConfig:
    site = Site(kind="gated", num_tokens=tokens, n=4096, k=4096, weights="fp8")
    most = most_stages(site, warpgroups, tokens, split_k, MAX_SHARED)
    assert most is not None
    return GemmConfig(warpgroups, tokens, multicast, split_k, min(3, most))


@every_format
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_configuration_has_the_bits_of_projection_and_gate(
    config: tuple[int, int, int, int], kept: torch.dtype, group: int
) -> None:
    which = config_of(*config)
    for (n, k), dtype, has_bias in zip(SHAPES, itertools.cycle(NARROW), (True, False, True), strict=False):
        for num_tokens in (1, which.tile_tokens - 1, which.tile_tokens + 3):
            *given, bias = operands(num_tokens, n, k, dtype, kept, group)
            bias = bias if has_bias else torch.zeros_like(bias)
            both = scaled.launch(*given, bias, dtype, which)
            check(both, (*given, bias), dtype)
            result = poisoned(
                lambda given=given, bias=bias, dtype=dtype: kernel.launch(*given, bias, dtype, which),
                (num_tokens, n // 2),
                dtype,
            )
            assert torch.equal(result, OPS.silu_and_mul.default(both))
            digits = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(result, silu_and_mul(both), rtol=digits, atol=digits)


def adopt(rows: int, n: int, k: int, kind: choices.Kind, config: GemmConfig | None, weights: str) -> None:
    """Let this configuration serve a site, or none."""
    bucket = choices.bucket_of_bytes(rows)
    site = Site(kind=kind, num_tokens=bucket, n=n, k=k, weights=weights)
    entry = Entry(site=site, kernel=config, microseconds=1.0, otherwise=2.0)
    choices.adopt(choices.device_name_of(DEVICE, torch.bfloat16), [entry])


@pytest.fixture
def shape(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Hidden and intermediate of an MLP of which nothing was measured, nor will be known after."""
    monkeypatch.setattr(choices, "_adopted", dict(choices._adopted))
    return 2176, 5760


@every_format
@pytest.mark.parametrize("rows", [1, 5, 8, 16, 40])
def test_the_op_has_the_bits_of_the_three_apart(
    rows: int, kept: torch.dtype, group: int, shape: tuple[int, int]
) -> None:
    hidden, inner = shape
    name = choices.kept_as(kept, 2 if group else 1)
    *first, bias = operands(rows, 2 * inner, hidden, torch.bfloat16, kept, group)
    *_, down, scale, down_bias = operands(1, hidden, inner, torch.bfloat16, kept, group)
    given = *first, bias, down, scale, down_bias, torch.bfloat16
    tile = max(8, choices.bucket_of_bytes(rows))
    adopt(rows, 2 * inner, hidden, "linear", config_of(2, tile, 1, 1), name)
    adopt(rows, hidden, inner, "linear", config_of(1, tile, 1, 4), name)
    wanted = _composed.mlp_w8a8(*given)
    for clusters in (0,) if group else (0, SHARES_PEAKS):
        adopt(rows, 2 * inner, hidden, "gated", config_of(2, tile, 1, 1), name)
        quantizing = config_of(1, 8, 1, 4)._replace(clusters=clusters)
        adopt(rows, hidden, inner, "quantizing", quantizing if rows <= 8 else None, name)
        assert kernel.config_of(first[0], first[2], first[3], torch.bfloat16) is not None
        result = poisoned(lambda: OPS.mlp_w8a8.default(*given), (rows, hidden), torch.bfloat16)
        if kept == FP8 or rows > 8:
            assert torch.equal(result, wanted)
        else:  # few rows of whole numbers are summed up in float, beyond 2^24 as well
            torch.testing.assert_close(result, wanted, rtol=2**-6, atol=2**-6)
        x = torch.empty(rows, inner, dtype=torch.bfloat16, device=DEVICE)
        assert (few.few_rows_config(x, down, scale) is None) == (rows > 8)


def test_a_captured_chain_replays_with_new_values(shape: tuple[int, int]) -> None:
    """Kernels that begin before the one ahead has ended read what it wrote in this replay, not the last."""
    hidden, inner = shape
    x, residual = (torch.randn(8, hidden, device=DEVICE).bfloat16() for _ in range(2))
    norm = torch.ones(hidden, device=DEVICE, dtype=torch.bfloat16)
    *_, gate_up, gate_up_scale, _ = operands(1, 2 * inner, hidden, torch.bfloat16, FP8, 0)
    *_, down, scale, _ = operands(1, hidden, inner, torch.bfloat16, FP8, 0)
    *_, square, square_scale, _ = operands(1, hidden, hidden, torch.bfloat16, FP8, 0)
    adopt(8, 2 * inner, hidden, "gated", config_of(2, 8, 1, 1), "fp8")
    for n, k in (hidden, inner), (hidden, hidden):
        sharing = config_of(1, 8, 1, 8)._replace(clusters=SHARES_PEAKS)
        adopt(8, n, k, "quantizing", sharing, "fp8")

    def chain() -> tuple[Tensor, Tensor]:
        out, total = x, residual
        for _ in range(6):
            values, x_scale, total = OPS.add_rms_norm_quantized.default(out, total, norm, 1e-5, 0, FP8)
            first = values, x_scale, gate_up, gate_up_scale, None
            out = OPS.mlp_w8a8.default(*first, down, scale, None, torch.bfloat16)
            out = OPS.linear_w8a8.default(out, square, square_scale)
        return out, total

    check_replays(chain, x, residual)
