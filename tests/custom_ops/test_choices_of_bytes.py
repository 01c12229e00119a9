"""Which kernel serves a projection in one byte, whether it was measured or not."""

from typing import Any

import pytest
import torch

from lamina.custom_ops._shared.fp8 import FP8
from lamina.custom_ops.linear import choices
from lamina.custom_ops.linear.choices import BUCKETS, Entry, GemmConfig, Site, candidates, guess
from lamina.custom_ops.linear_w8a8 import _cuda as few
from lamina.custom_ops.mlp_w8a8 import _cuda as mlp
from lamina.custom_ops.scaled_linear import _cuda as scaled

SHAPES = [(6144, 4096), (4096, 14336), (28672, 4096), (2048, 2048), (96, 64), (72, 16)]
NAME = "a GPU of tests"


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 132 multiprocessors, of which nothing was measured."""
    monkeypatch.setattr(scaled, "processors_of", lambda device: 132)
    for module in (scaled, few, mlp):
        monkeypatch.setattr(module, "device_name_of", lambda device, dtype: NAME)
    scaled._config_of.cache_clear()


def weight_of(n: int, k: int, *, grouped: bool = False, dtype: torch.dtype = FP8) -> tuple[Any, Any]:
    return torch.empty(n, k, dtype=dtype), torch.empty((n, -(-k // 128)) if grouped else (n,))


@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("num_tokens", BUCKETS)
def test_a_guess_is_one_of_the_candidates(n: int, k: int, num_tokens: int) -> None:
    for weights in choices.BYTES:
        site = Site(kind="linear", num_tokens=num_tokens, n=n, k=k, weights=weights)
        assert guess(site, 132) in candidates(site, 132)


def test_of_few_rows_blocks_that_leave_room_for_three_others_are_tried_but_never_guessed() -> None:
    for weights in ("dense", "fp8"):
        site = Site(kind="linear", num_tokens=8, n=28672, k=4096, weights=weights)
        tried = {config.stages for config in candidates(site, 132) if config[:4] == (1, 8, 1, 1)}
        fitting = {choices.most_stages(site, 1, 8, 1, choices.MAX_SHARED // room) for room in (1, 2, 3, 4)}
        assert tried == fitting
        assert len(tried) == 4
        guessed = guess(site, 132)
        assert guessed is not None
        by_half = choices.MAX_SHARED // 2
        assert guessed.stages == choices.most_stages(site, *guessed[:2], guessed.split_k, by_half)


def test_a_tile_in_fp8_has_twice_the_columns_so_that_fewer_stages_are_of_use() -> None:
    dense = Site(kind="linear", num_tokens=8, n=4096, k=1024)
    fp8 = Site(kind="linear", num_tokens=8, n=4096, k=1024, weights="fp8")
    assert choices.most_stages(dense, 1, 8, 1, choices.MAX_SHARED) == 8
    assert choices.most_stages(fp8, 1, 8, 1, choices.MAX_SHARED) == 4


def test_what_was_not_measured_is_guessed_and_what_was_slower_left_to_the_library() -> None:
    weight, scale = weight_of(4096, 4096)
    site = Site(kind="linear", num_tokens=8, n=4096, k=4096, weights="fp8")
    assert scaled.config_of(5, weight, scale, torch.bfloat16) == guess(site, 132)
    config = GemmConfig(1, 8, 1, 2, 4)
    choices.adopt(NAME, [Entry(site=site, kernel=config, microseconds=5.0, otherwise=9.0)])
    assert scaled.config_of(5, weight, scale, torch.bfloat16) == config
    choices.adopt(NAME, [Entry(site=site, kernel=config, microseconds=9.0, otherwise=5.0)])
    assert scaled.config_of(5, weight, scale, torch.bfloat16) is None
    assert scaled.config_of(5, weight, scale, torch.bfloat16, needs_ours=True) == guess(site, 132)


@pytest.mark.parametrize("microseconds, is_ours", [(100.0, True), (102.0, True), (104.0, False)])
def test_a_kernel_that_starts_early_may_be_a_little_slower_alone(microseconds: float, is_ours: bool) -> None:
    site = Site(kind="linear", num_tokens=256, n=28672, k=4096, weights="fp8")
    config = GemmConfig(2, 256, 2, 1, 4, 66)
    choices.adopt(NAME, [Entry(site=site, kernel=config, microseconds=microseconds, otherwise=100.0)])
    assert choices.choose(site, NAME).kernel == (config if is_ours else None)


def test_many_rows_of_which_nothing_is_known_are_the_librarys_where_it_can() -> None:
    for grouped, dtype in (False, torch.bfloat16), (True, torch.bfloat16), (False, torch.float16):
        config = scaled.config_of(1000, *weight_of(4096, 4096, grouped=grouped), dtype)
        assert (config is None) == (not grouped and dtype == torch.bfloat16)
        assert config is None or config.clusters


def test_many_rows_are_whose_they_were_measured_to_be_and_beyond_all_the_last_ones() -> None:
    weight, scale = weight_of(2048, 4096)
    config = GemmConfig(2, 256, 2, 1, 4, 66)
    entries = [
        Entry(
            site=Site(kind="linear", num_tokens=bucket, n=2048, k=4096, weights="fp8"),
            kernel=config._replace(clusters=clusters),
            microseconds=5.0,
            otherwise=9.0,
        )
        for bucket, clusters in zip(choices.MANY, (64, 65, 66), strict=True)
    ]
    choices.adopt(NAME, entries)
    for num_tokens, clusters in (257, 64), (512, 64), (513, 65), (8192, 66), (100_000, 66):
        assert scaled.config_of(num_tokens, weight, scale, torch.bfloat16) == config._replace(
            clusters=clusters
        )
    for site in (entry.site for entry in entries):
        assert {one.tile_tokens for one in candidates(site, 132)} == {128, 256}
        assert all(one.clusters == 66 and one.warpgroups == 2 for one in candidates(site, 132))


def test_whole_numbers_have_no_library_and_are_summed_up_in_32_bits() -> None:
    for num_tokens in (1, 100, 1000):
        config = scaled.config_of(num_tokens, *weight_of(4096, 4096, dtype=torch.int8), torch.bfloat16)
        assert config is not None
        assert bool(config.clusters) == (num_tokens > 64)
    wide = torch.empty(1, 1 << 17, dtype=torch.int8), torch.empty(1)
    assert scaled.config_of(1, *wide, torch.bfloat16) is not None
    wider = torch.empty(1, (1 << 17) + 16, dtype=torch.int8), torch.empty(1)
    assert scaled.config_of(1, *wider, torch.bfloat16) is None


@pytest.mark.parametrize("n, k, dtype", [(64, 40, torch.bfloat16), (64, 64, torch.float32)])
def test_what_tma_or_the_epilogue_does_not_take_has_no_configuration(
    n: int, k: int, dtype: torch.dtype
) -> None:
    assert scaled.config_of(4, *weight_of(n, k), dtype) is None


def test_few_rows_in_16_bits_are_quantized_by_the_projection_itself() -> None:
    weight, scale = weight_of(4096, 4096)
    x = torch.empty(few.FEW, 4096, dtype=torch.bfloat16)
    config = few.few_rows_config(x, weight, scale)
    assert config is not None
    assert (config.tile_tokens, config.multicast, config.clusters) == (8, 1, 0)
    for other in (torch.empty(few.FEW + 1, 4096, dtype=torch.bfloat16), x[:, ::2]):
        assert few.few_rows_config(other, weight[:, : other.shape[1]].contiguous(), scale) is None


def test_a_pace_of_the_projection_alone_is_none_of_the_one_that_quantizes() -> None:
    """Whose clusters say other things."""
    weight, scale = weight_of(4096, 4096)
    x = torch.empty(1, 4096, dtype=torch.bfloat16)
    site = Site(kind="linear", num_tokens=1, n=4096, k=4096, weights="fp8")
    paced = GemmConfig(1, 8, 1, 1, 12, 4)
    choices.adopt(NAME, [Entry(site=site, kernel=paced, microseconds=1.0, otherwise=2.0)])
    assert few.few_rows_config(x, weight, scale) == paced._replace(clusters=0)


def test_whether_a_projection_quantizes_its_rows_is_what_was_measured() -> None:
    weight, scale = weight_of(4096, 4096)
    x = torch.empty(8, 4096, dtype=torch.bfloat16)
    site = Site(kind="quantizing", num_tokens=8, n=4096, k=4096, weights="fp8")
    assert few.few_rows_config(x, weight, scale) is None
    config = GemmConfig(2, 8, 1, 8, 2, choices.SHARES_PEAKS)
    for microseconds, wanted in (5.0, config), (9.0, None):
        entry = Entry(site=site, kernel=config, microseconds=microseconds, otherwise=7.0)
        choices.adopt(NAME, [entry])
        assert few.few_rows_config(x, weight, scale) == wanted
        assert few.few_rows_config(x[:3], weight, scale) == wanted
    assert few.few_rows_config(x[:1], weight, scale) is not None  # of which nothing was measured
    assert few.few_rows_config(torch.empty(9, 4096, dtype=torch.bfloat16), weight, scale) is None


@pytest.mark.parametrize("weights", choices.BYTES)
def test_blocks_that_divide_rows_may_find_their_peaks_together_but_for_groups(weights: str) -> None:
    for num_tokens in (1, 8):
        tried = candidates(
            Site(kind="quantizing", num_tokens=num_tokens, n=4096, k=4096, weights=weights), 132
        )
        sharing = [config for config in tried if config.clusters]
        assert bool(sharing) == (weights != "fp8_block")
        assert all(config.split_k > 1 and config.clusters == choices.SHARES_PEAKS for config in sharing)
        assert {config.split_k for config in tried} == {1, 2, 4, 8}
        assert all((config.tile_tokens, config.multicast) == (8, 1) for config in tried)


def test_a_gate_has_a_kernel_up_to_64_rows_and_is_taken_where_that_was_measured() -> None:
    weight, scale = weight_of(28672, 4096)
    x = torch.empty(300, 4096, dtype=weight.dtype)
    for rows, bucket in (1, 1), (5, 8), (40, 64), (65, 128):
        assert mlp.config_of(x[:rows], weight, scale, torch.bfloat16) is None  # nothing is guessed
        site = Site(kind="gated", num_tokens=bucket, n=28672, k=4096, weights="fp8")
        tried = candidates(site, 132)
        assert tried
        assert all(config.warpgroups > 1 and not config.clusters for config in tried)
        config = GemmConfig(2, 8, 1, 1, 3)
        choices.adopt(NAME, [Entry(site=site, kernel=config, microseconds=5.0, otherwise=9.0)])
        taken = mlp.config_of(x[:rows], weight, scale, torch.bfloat16)
        assert taken == (config if rows <= choices.GATED_ROWS else None)


def test_sites_of_projections_that_do_more_are_those_of_what_they_stand_for_and_their_own() -> None:
    alone = choices.sites_of("linear", 4096, 4096, weights="fp8")
    quantizing = choices.sites_of("quantizing", 4096, 4096, weights="fp8")
    gated = choices.sites_of("norm_gated", 4096, 4096, weights="fp8")
    assert quantizing[: len(alone)] == gated[: len(alone)] == alone
    assert [(site.kind, site.num_tokens) for site in quantizing[len(alone) :]] == [
        ("quantizing", 1),
        ("quantizing", 8),
    ]
    assert {site.num_tokens for site in gated[len(alone) :]} == {1, 8, 16, 32, 64}
