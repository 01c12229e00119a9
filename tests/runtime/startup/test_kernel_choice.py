"""What serves a model's GEMMs: known from package or store, else measured once; no GPU is needed."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lamina.common.errors import NotWarmError
from lamina.common.store import Store
from lamina.compiler.passes.gemms import Gemm
from lamina.custom_ops.linear import _cpu, autotune, choices
from lamina.custom_ops.linear.choices import Entry, GemmConfig, Site
from lamina.runtime.startup import kernel_choice
from lamina.runtime.startup.kernel_choice import (
    choose_gemm_kernels,
    describe_cpu_kernels,
    missing_measurements,
)

DEVICE, CUDA, CPU = "a GPU on paper", torch.device("cuda"), torch.device("cpu")
GEMMS = (
    Gemm(kind="linear", rows=2048, columns=1024, dtype="bfloat16"),
    Gemm(kind="norm_gated", rows=4096, columns=1024, dtype="bfloat16"),
)
CONFIG = GemmConfig(1, 8, 1, 1, 4)


@pytest.fixture
def store(tmp_path: Any) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Site]:
    """The sites that were measured, on a GPU that is not there and for which nothing is shipped."""
    measured: list[Site] = []

    def tune(sites: Iterable[Site], device: torch.device, dtype: torch.dtype) -> tuple[Entry, ...]:
        entries = tuple(Entry(site=site, kernel=CONFIG, microseconds=5.0, otherwise=9.0) for site in sites)
        measured.extend(entry.site for entry in entries)
        choices.adopt(DEVICE, entries)
        return entries

    monkeypatch.setattr(autotune, "autotune", tune)
    monkeypatch.setattr(choices, "_adopted", {})
    monkeypatch.setattr(choices, "shipped", dict)
    monkeypatch.setattr(choices, "processors_of", lambda device: 132)
    monkeypatch.setattr(choices, "device_name_of", lambda device, dtype: DEVICE)
    monkeypatch.setattr(
        choices, "candidates", lambda site, processors: [CONFIG] if site.num_tokens <= 16 else []
    )
    monkeypatch.setattr(kernel_choice.registry, "select", lambda *args, **kwargs: _Named("cuda"))
    choices.adopt(DEVICE, ())
    return measured


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name


def settle(store: Store, gemms: tuple[Gemm, ...] = GEMMS, **options: Any) -> tuple[str, ...]:
    return choose_gemm_kernels(gemms, CUDA, torch.bfloat16, store, **options)


def start_anew() -> None:
    """What another process begins with."""
    choices._adopted.clear()
    choices.adopt(DEVICE, ())


def test_every_kernel_that_might_serve_is_measured_once_and_told(store: Store, asked: list[Site]) -> None:
    lines = settle(store)
    assert len(lines) == len(asked) == len(set(asked))
    assert {site.kind for site in asked if site.n == 2048} == {"linear"}
    assert {site.kind for site in asked if site.n == 4096} == {"linear", "gated"}
    assert all("the CUDA kernel" in line and "5.0 us" in line for line in lines)
    assert settle(store, GEMMS * 2) == lines, "what stands twice in a model is told once"


def test_another_process_takes_what_the_store_holds(store: Store, asked: list[Site]) -> None:
    lines = settle(store)
    asked.clear()
    start_anew()
    assert settle(store, require_warm=True) == lines
    assert not asked


def test_only_what_is_new_is_measured_and_the_rest_is_kept(store: Store, asked: list[Site]) -> None:
    settle(store, GEMMS[:1])
    asked.clear()
    settle(store)
    assert asked
    assert {site.n for site in asked} == {4096}
    asked.clear()
    start_anew()
    settle(store)
    assert not asked


def test_what_is_not_measured_yet_is_named_without_measuring(store: Store, asked: list[Site]) -> None:
    lacks = missing_measurements(GEMMS, CUDA, torch.bfloat16, store)
    assert lacks[0].startswith("kernels of linear [2048, 1024]")
    assert not asked
    settle(store)
    start_anew()
    assert missing_measurements(GEMMS, CUDA, torch.bfloat16, store) == []
    assert missing_measurements(GEMMS, torch.device("cpu"), torch.bfloat16, store) == []


def test_nothing_is_measured_where_all_must_be_warm(store: Store, asked: list[Site]) -> None:
    with pytest.raises(NotWarmError, match=r"lacks measurements of kernels of linear \[2048, 1024\]"):
        settle(store, require_warm=True)
    assert not asked


@pytest.mark.parametrize(
    "record",
    [
        *(
            {"entries": entries}
            for entries in ([["linear"]], ["no line"], [["linear", 8, 9, 9, [1], "x", 1.0]])
        ),
        *({}, [], "text"),
    ],
    ids=str,
)
def test_measurements_that_cannot_be_read_are_made_again(
    store: Store, asked: list[Site], record: Any
) -> None:
    key = kernel_choice.measurements_key(CUDA, DEVICE, torch.bfloat16)
    store.write_ref(kernel_choice.MEASUREMENTS, key, record)
    assert settle(store)
    assert asked


def test_what_is_small_or_does_not_fit_is_left_to_the_library(store: Store, asked: list[Site]) -> None:
    small, odd = (replace(GEMMS[0], **change) for change in ({"rows": 1000}, {"columns": 1023, "rows": 4096}))
    assert settle(store, (small, odd)) == ()
    assert not asked


def test_without_room_to_measure_the_library_serves(
    store: Store, asked: list[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(*args: Any) -> tuple[Entry, ...]:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(autotune, "autotune", tune)
    lines = settle(store)
    assert lines
    assert all("the ops it stands for (not measured" in line for line in lines)


def test_another_dtype_is_measured_apart(store: Store, asked: list[Site]) -> None:
    keys = {kernel_choice.measurements_key(CUDA, DEVICE, dtype) for dtype in (torch.bfloat16, torch.float16)}
    assert len(keys) == 2


@pytest.mark.parametrize("device, provider", [("cpu", "reference"), ("cuda", "triton")])
def test_where_nothing_is_to_choose_nothing_is_done(
    store: Store, asked: list[Site], monkeypatch: pytest.MonkeyPatch, device: str, provider: str
) -> None:
    monkeypatch.setattr(kernel_choice.registry, "select", lambda *args, **kwargs: _Named(provider))
    assert choose_gemm_kernels(GEMMS, torch.device(device), torch.bfloat16, store) == ()
    assert not asked


@pytest.mark.parametrize("found_next, kept", [(1.1, 1.1), (4.0, 3.0)])
def test_what_was_measured_beside_other_work_is_measured_again(
    store: Store, asked: list[Site], monkeypatch: pytest.MonkeyPatch, found_next: float, kept: float
) -> None:
    spread = 3.0

    def tune(sites: Iterable[Site], device: torch.device, dtype: torch.dtype) -> tuple[Entry, ...]:
        asked.extend(sites := tuple(sites))
        entry = Entry(site=sites[0], kernel=CONFIG, microseconds=5.0, otherwise=9.0, spread=spread)
        return tuple(replace(entry, site=site) for site in sites)

    monkeypatch.setattr(autotune, "autotune", tune)
    lines = settle(store, GEMMS[:1])
    assert all("beside other work: the median was 3.0 times the best" in line for line in lines)
    num_sites, spread = len(asked), found_next
    start_anew()
    assert missing_measurements(GEMMS[:1], CUDA, torch.bfloat16, store) == []
    assert settle(store, GEMMS[:1], require_warm=True) == lines
    assert len(asked) == num_sites  # who wants no work gets none
    assert (settle(store, GEMMS[:1]) == lines) == (kept == 3.0)
    assert len(asked) == 2 * num_sites
    key = kernel_choice.measurements_key(CUDA, DEVICE, torch.bfloat16)
    assert {entry.spread for entry in kernel_choice.read_measurements(store, key)} == {kept}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cpu_autotunes_its_gemms_once_and_says_what_serves_them(
    store: Store, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(choices, "_adopted", {})
    monkeypatch.setattr(autotune, "ROTATED_BYTES", 1)
    gemms = (Gemm(kind="norm_gated", rows=1024, columns=1024, dtype="any"),)
    lines = choose_gemm_kernels(gemms, CPU, dtype, store)
    assert len(lines) == 2 * sum(bool(_cpu.methods(dtype, rows)) for rows in choices.BUCKETS)
    for rows in choices.BUCKETS:
        told = [line for line in lines if f"up to {rows} rows" in line]
        others = len(_cpu.ways(dtype, rows)) > 1
        assert all(("(measured here" in line) == others for line in told)
        assert all(("(nothing else serves so many rows)" in line) != others for line in told)
    start_anew()
    monkeypatch.setattr(autotune, "autotune", None)
    assert choose_gemm_kernels(gemms, CPU, dtype, store, require_warm=True) == lines


@pytest.mark.parametrize("has_amx", [True, False])
def test_which_kernels_serve_a_cpu_and_at_what_is_told(
    store: Store, monkeypatch: pytest.MonkeyPatch, has_amx: bool
) -> None:
    monkeypatch.setattr(choices, "_adopted", {})
    monkeypatch.setattr(_cpu, "_has_amx", lambda: has_amx)
    monkeypatch.setattr(kernel_choice, "is_built", lambda op: True)
    site = Site(kind="linear", num_tokens=256, n=4096, k=4096)
    entry = Entry(site=site, kernel=choices.Method.AMX, microseconds=5.0, otherwise=9.0, spread=2.0)
    name = choices.device_name_of(CPU, torch.bfloat16)
    key = kernel_choice.measurements_key(CPU, name, torch.bfloat16)
    store.write_ref(kernel_choice.MEASUREMENTS, key, {"device": name, "entries": [entry.to_json()]})
    told = describe_cpu_kernels(store)
    assert "float32: dot products up to 32 rows, the library beyond" in told
    if not has_amx:
        assert told[0] == "bfloat16: dot products up to 32 rows, the library beyond"
        return
    few = "AMX tiles or dot products up to 1 rows, AMX tiles up to 32 rows"
    assert told[0] == f"bfloat16: {few}, AMX tiles or the library beyond"
    assert "measured here: 5.0 us, otherwise 9.0 us, beside other work: the median was 2.0 times" in told[1]


def test_before_kernels_are_built_nothing_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "is_built", lambda op: False)
    assert describe_cpu_kernels(store) == ()
