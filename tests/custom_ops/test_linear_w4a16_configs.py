"""Configurations of the CUDA kernel of four-bit weights: those tried, and those of what nobody measured."""

import itertools

import pytest
import torch

from lamina.custom_ops.linear.choices import BUCKETS, MAX_SHARED, GemmConfig, Kind, checked, sites_of
from lamina.custom_ops.linear_w4a16.configs import (
    BY_WARPS,
    MMA,
    PLAIN,
    PLAIN_TOKENS,
    SYSTEM_BYTES,
    WARPGROUPS,
    bits_of,
    candidates,
    default_config,
    general,
    group_of,
    group_shift,
    num_steps,
    shared_bytes,
    site_of,
    weights_name,
)

SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (3072, 2048), (960, 576), (576, 1536)]


def fits(config: GemmConfig, k: int, group: int, bits: int) -> bool:
    """Whether a GPU can launch it, and the kernel has it."""
    warpgroups, tokens, _, split_k, stages, clusters = checked(config)
    size = shared_bytes(warpgroups, tokens, group, stages, bits=bits)
    useful = stages <= max(2, num_steps(tokens, k, split_k, bits))
    compiled = BY_WARPS if clusters & MMA else WARPGROUPS
    if clusters & PLAIN and ((group, bits) != (128, 4) or tokens not in PLAIN_TOKENS[clusters & MMA]):
        return False
    return tokens in compiled[warpgroups] and size <= MAX_SHARED - SYSTEM_BYTES and useful


@pytest.mark.parametrize("bits, group", [(4, 32), (4, 64), (4, 128), (4, -1), (8, 32), (8, 128)])
@pytest.mark.parametrize("num_processors", [132, 114, 78, 16])
@pytest.mark.parametrize("n, k", SHAPES)
def test_every_configuration_can_be_launched(
    n: int, k: int, num_processors: int, bits: int, group: int
) -> None:
    for bucket in BUCKETS:
        for kind in ("linear", "gated") if n % 128 == 0 else ("linear",):
            site = site_of(kind, bucket, n, k, torch.bfloat16, group, bits)
            guess = default_config(kind, bucket, n, k, group, num_processors, bits)
            tried = candidates(site, group, num_processors)
            assert all(fits(config, k, group, bits) for config in (guess, *tried))
            assert all(config.warpgroups > 1 for config in tried) or kind == "linear"
            assert tried
            assert any(config.clusters & MMA for config in tried) == (bucket <= 32)
            assert any(config.clusters & PLAIN for config in tried) == ((bits, group) == (4, 128))
            assert len({general(config) for config in tried}) == len(tried)


def test_what_nobody_measured_is_served_nearly_as_the_fastest_on_an_h200() -> None:
    """Blocks of an 8B model's projections run at once; three of its sites as they were measured."""
    for (n, k), bucket in itertools.product(SHAPES[:4], (8, 32)):
        kind: Kind = "gated" if n == 28672 else "linear"
        config = default_config(kind, bucket, n, k, 128, 132)
        blocks = n // (64 * config.warpgroups) * config.split_k
        assert 132 <= blocks <= 3 * 132
    assert default_config("linear", 1, 6144, 4096, 128, 132) == GemmConfig(1, 8, 1, 4, 4)
    assert default_config("gated", 1, 28672, 4096, 128, 132) == GemmConfig(2, 8, 1, 1, 5)
    assert default_config("gated", 32, 28672, 4096, 128, 132) == GemmConfig(2, 32, 1, 1, 5)


@pytest.mark.parametrize(
    "group, k, name", [(128, 4096, "w4a16/128"), (-1, 96, "w4a16/all"), (96, 96, "w4a16/all")]
)
def test_sites_name_the_weights_by_their_groups(group: int, k: int, name: str) -> None:
    assert weights_name(group, k) == name
    site, *_ = sites_of("gated", 128, k, weights=name)
    assert site.kind == "gated"
    assert group_of(site) == (-1 if group in (-1, k) else group)
    assert group_of(site_of("linear", 8, 128, k, torch.float16, group)) == group_of(site)
    assert group_of(sites_of("linear", 128, k)[0]) is None
    of_eight = site_of("linear", 8, 128, k, torch.float16, group, 8)
    assert of_eight.weights == name.replace("w4", "w8") == weights_name(group, k, 8)
    assert (bits_of(of_eight.weights), bits_of(name), bits_of("dense")) == (8, 4, None)
    assert group_of(of_eight) == group_of(site)


@pytest.mark.parametrize(
    "group, shift", [(32, 0), (64, 1), (1024, 5), (-1, 30), (4096, 30), (96, None), (16, None)]
)
def test_groups_are_counted_by_powers_of_two_or_not_at_all(group: int, shift: int | None) -> None:
    assert group_shift(group, 4096) == shift
