"""Which kernel serves a GEMM: by measurements alone, and what is known of them."""

from dataclasses import replace

import pytest

from lamina.custom_ops.linear.choices import (
    BUCKETS,
    MANY,
    MAX_CLUSTER,
    MAX_SHARED,
    MAX_STAGES,
    Entry,
    GemmConfig,
    Kind,
    Site,
    adopt,
    bucket_of,
    bucket_of_prompt,
    candidates,
    checked,
    choose,
    guess,
    is_measured,
    most_stages,
    one_order,
    parse_entry,
    persistent_stages,
    shipped,
    sites_of,
)
from lamina.custom_ops.linear.gemm_config import PERSISTENT_TOKENS

SITE = Site(kind="gated", num_tokens=8, n=512, k=256)
CONFIG = GemmConfig(2, 8, 1, 4, 3)
PROCESSORS = 132, 114, 78, 16, 1  # of an H100 or H200, the former on PCIe, an H20, a part of one
KINDS: tuple[Kind, ...] = ("linear", "gated")


def entry(*, microseconds: float = 3.0, otherwise: float = 5.0) -> Entry:
    return Entry(site=SITE, kernel=CONFIG, microseconds=microseconds, otherwise=otherwise)


def test_an_entry_survives_its_line() -> None:
    assert parse_entry(entry().to_json()) == entry()


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["linear", 8, 4, 4, "bfloat16", "dense", [1, 8, 1, 1], 1.0, 2.0],
        [*entry().to_json(), 3],
        [*entry().to_json(), 1, 1],
    ],
)
def test_a_line_of_another_shape_is_refused(line: list[object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        parse_entry(line)


@pytest.mark.parametrize(
    "change",
    [
        *({"split_k": split} for split in (0, 3, 16, 2.0)),
        *({"multicast": 3, "tile_tokens": 24}, {"multicast": 4, "tile_tokens": 32, "split_k": 4}),
        *(
            {"warpgroups": 3},
            {"stages": 1},
            {"stages": 99},
            {"clusters": -1},
            {"clusters": 9},
            {"tile_tokens": 0},
        ),
    ],
    ids=str,
)
def test_a_configuration_that_no_kernel_has_is_refused_wherever_it_comes_from(change: dict[str, int]) -> None:
    *before, _, microseconds, otherwise = entry().to_json()
    with pytest.raises(ValueError, match="GemmConfig"):
        parse_entry([*before, [*CONFIG._replace(**change)], microseconds, otherwise])


def test_a_number_of_rows_goes_to_the_next_bucket() -> None:
    assert [bucket_of(rows) for rows in (1, 2, 8, 9, 200, 256)] == [1, 8, 8, 16, 256, 256]
    assert bucket_of(257) is None


def test_what_was_not_measured_is_the_librarys() -> None:
    choice = choose(SITE, "a GPU of no name")
    assert choice.kernel is None
    assert choice.reason == "not measured on a GPU of no name"


def test_what_was_measured_here_goes_by_its_figures() -> None:
    adopt("GPU A", [entry()])
    assert is_measured(SITE, "GPU A")
    assert choose(SITE, "GPU A").kernel == CONFIG
    assert choose(SITE, "GPU A").reason == "measured here: 3.0 us, otherwise 5.0 us"
    adopt("GPU A", [entry(otherwise=2.0)])
    assert choose(SITE, "GPU A").kernel is None
    assert not is_measured(SITE, "GPU B")


def test_of_many_rows_a_few_percent_are_no_reason() -> None:
    few, many = (replace(entry(microseconds=4.9), site=replace(SITE, num_tokens=rows)) for rows in (64, 128))
    adopt("GPU C", [few, many])
    assert choose(few.site, "GPU C").kernel == CONFIG
    assert choose(many.site, "GPU C").kernel is None


def test_gate_and_up_apart_may_take_a_little_longer_than_the_librarys() -> None:
    """Adapters stand behind them then; the library's kernel would have the kernels around it wait."""
    slow = replace(entry(microseconds=3.0, otherwise=2.9), site=replace(SITE, kind="linear"))
    adopt("GPU E", [slow])
    assert choose(slow.site, "GPU E").kernel is None
    adopt("GPU E", [entry()])
    assert choose(slow.site, "GPU E").kernel == slow.kernel
    adopt("GPU E", [replace(slow, otherwise=2.8)])
    assert choose(slow.site, "GPU E").kernel is None


def test_what_was_measured_in_one_dtype_or_format_says_nothing_of_another() -> None:
    adopt("GPU D", [entry()])
    assert choose(SITE, "GPU D").kernel == CONFIG
    for other in (replace(SITE, dtype="float16"), replace(SITE, weights="float8_e4m3")):
        assert not is_measured(other, "GPU D")
        assert choose(other, "GPU D").kernel is None
        adopt("GPU D", [replace(entry(otherwise=2.0), site=other)])
        assert choose(SITE, "GPU D").kernel == CONFIG


@pytest.mark.parametrize("processors", PROCESSORS)
def test_persistent_blocks_are_never_more_than_there_is_room_for_at_once(processors: int) -> None:
    site = Site(kind="linear", num_tokens=256, n=28672, k=4096)
    clusters = {config.clusters for config in candidates(site, processors) if config.clusters}
    assert all(2 * count <= processors for count in clusters)
    assert max(clusters, default=0) == processors // 2
    assert processors != 132 or clusters == {64, 66}


def test_a_gemm_comes_to_its_parts_as_well() -> None:
    sites = sites_of("norm_gated", 512, 256)
    assert {site.kind for site in sites} == {"linear", "gated"}
    assert [site.num_tokens for site in sites if site.kind == "gated"] == list(BUCKETS)
    assert {site.kind for site in sites_of("norm", 512, 256)} == {"linear"}
    assert {site.kind for site in sites_of("linear", 512, 256)} == {"linear"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n,k", [(3072, 2048), (4096, 14336), (128256, 4096), (576, 576)])
def test_every_candidate_is_one_that_the_kernel_takes(kind: Kind, n: int, k: int) -> None:
    for site in (site for site in sites_of("norm_gated", n, k) if site.kind == kind):
        for config in (config for processors in PROCESSORS for config in candidates(site, processors)):
            assert checked(config) is config
            assert config.multicast * config.split_k <= MAX_CLUSTER
            assert config.tile_tokens % (8 * config.multicast) == 0
            assert config.clusters or kind != "gated" or config.warpgroups % 2 == 0
            assert 2 <= config.stages <= min(most_of(site, config), MAX_STAGES)


def most_of(site: Site, config: GemmConfig) -> int:
    """The stages that a configuration's memory takes."""
    if config.clusters:
        return persistent_stages(config.warpgroups, config.tile_tokens)
    most = most_stages(site, config.warpgroups, config.tile_tokens, config.split_k, MAX_SHARED)
    assert most is not None
    return most


def test_persistent_kernels_are_tried_for_many_rows_alone() -> None:
    def stays(num_tokens: int, n: int = 4096) -> bool:
        site = Site(kind="linear", num_tokens=num_tokens, n=n, k=4096)
        return any(config.clusters for config in candidates(site, 132))

    assert [bucket for bucket in BUCKETS if stays(bucket)] == list(PERSISTENT_TOKENS)
    assert not stays(256, n=4097)  # results are written eight at once


def test_a_prompt_has_its_gate_in_the_gemm_where_tiles_are_full() -> None:
    full = {256 * 2: 512, 510: 512, 1024: 2048, 1020: 2048, 4096: 8192, 8000: 8192, 8192: 8192, 16384: 8192}
    assert {rows: bucket_of_prompt(rows) for rows in full} == full
    assert not any(map(bucket_of_prompt, (257, 300, 384, 490, 600, 1100, 4120)))


def test_what_is_shipped_can_be_launched() -> None:
    for (name, site), shipped_entry in shipped().items():
        assert choose(site, name).reason.startswith(f"measured on {name}")
        of_a_prompt = site.is_in_bytes or site.kind == "gated"
        assert site.num_tokens in ((*BUCKETS, *MANY) if of_a_prompt else BUCKETS)
        if shipped_entry.kernel is None:  # whole steps decided
            assert choose(site, name).kernel is None
            assert parse_entry(shipped_entry.to_json()) == shipped_entry
            continue
        assert isinstance(shipped_entry.kernel, GemmConfig)
        assert shipped_entry.kernel.stages <= most_of(site, shipped_entry.kernel)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (64, 64), (1040, 72), (151936, 2560)])
@pytest.mark.parametrize("processors", PROCESSORS)
def test_every_number_of_rows_is_summed_in_one_order_where_that_is_asked_for(
    kind: Kind, n: int, k: int, processors: int
) -> None:
    split_k = one_order(n, k, processors)
    for site in sites_of("gated" if kind == "gated" else "linear", n, k, split_k=split_k):
        found = [guess(site, processors), *candidates(site, processors)]
        assert len(found) > 1
        assert all(config is not None and config.split_k == split_k for config in found)
        assert (
            parse_entry(Entry(site=site, kernel=found[1], microseconds=3.0, otherwise=2.0).to_json()).site
            == site
        )


def test_a_measured_configuration_of_one_order_is_taken_though_the_library_is_faster() -> None:
    site = replace(SITE, split_k=2)
    slow = Entry(site=site, kernel=CONFIG._replace(split_k=2), microseconds=9.0, otherwise=5.0)
    adopt("a slow GPU", [slow])
    assert choose(site, "a slow GPU").kernel == slow.kernel
    assert choose(SITE, "a slow GPU").kernel is None
    with pytest.raises(ValueError, match="does not divide columns by 2"):
        parse_entry([*slow.to_json()[:6], [*CONFIG], 9.0, 5.0, 2])


@pytest.mark.parametrize(
    ("split_k", "tokens", "clusters", "is_taken"),
    [(2, 8, 0, True), (1, 8, 0, False), (2, 8, 4, True), (2, 128, 64, False)],
    ids=str,
)
def test_what_serves_without_a_given_order_serves_with_it_where_it_sums_so(
    split_k: int, tokens: int, clusters: int, is_taken: bool
) -> None:
    """It may be by whole steps, and at any pace. A persistent kernel splits its last tiles alone."""
    name, own = f"a GPU for {split_k}, {tokens} and {clusters}", replace(SITE, split_k=2)
    plain = CONFIG._replace(split_k=split_k, tile_tokens=tokens, clusters=clusters)
    adopt(name, [Entry(site=SITE, kernel=plain, microseconds=9.0, otherwise=5.0)])
    assert is_measured(own, name) == is_taken
    other = CONFIG._replace(split_k=2, stages=2)
    adopt(name, [Entry(site=own, kernel=other, microseconds=1.0, otherwise=5.0)])
    assert choose(own, name).kernel == (plain if is_taken else other)


@pytest.mark.parametrize("bucket", [1, 8, 16, 32, 64])
@pytest.mark.parametrize(
    ("kind", "n", "k"),
    [("linear", 6144, 4096), ("linear", 4096, 4096), ("linear", 4096, 14336), ("gated", 28672, 4096)],
)
def test_up_to_64_rows_one_order_costs_the_layers_of_an_8b_nothing_on_an_h200(
    kind: Kind, n: int, k: int, bucket: int
) -> None:
    site = Site(kind=kind, num_tokens=bucket, n=n, k=k)
    chosen = choose(replace(site, split_k=one_order(n, k, 132)), "NVIDIA H200").kernel
    assert chosen is not None
    assert chosen == choose(site, "NVIDIA H200").kernel
