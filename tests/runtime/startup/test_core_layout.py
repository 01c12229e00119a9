"""What the system says of slower cores and nodes of memory, read from folders as /sys/devices has them."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.runtime.startup import threads
from lamina.runtime.startup.core_layout import num_memory_nodes, parse_cpu_list, remarks, slower_cpus

EIGHT = frozenset(range(8))
HYBRID = {"cpu_core/cpus": "0-3", "cpu_atom/cpus": "4-7"}
CAPACITIES = {f"system/cpu/cpu{cpu}/cpu_capacity": "1024" if cpu < 6 else "446" for cpu in EIGHT}
NODES = {"system/node/node0/cpulist": "0-1,4-5", "system/node/node1/cpulist": "2-3,6-7"}
NODES |= {"system/node/node2/cpulist": "", "system/node/has_cpu": "0-1"}  # of memory alone


def devices(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@given(st.frozensets(st.integers(0, 300)))
def test_a_list_of_cpus_is_read_as_the_kernel_writes_it(cpus: frozenset[int]) -> None:
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    text = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    assert parse_cpu_list(f"{text}\n") == cpus


@pytest.mark.parametrize("text", ["", "none", "0-", "-3", "0,x", "1-2-3"])
def test_what_is_no_list_has_no_cpus(text: str) -> None:
    assert parse_cpu_list(text) == frozenset()


def test_efficient_cores_are_slower_only_beside_fast_ones(tmp_path: Path) -> None:
    root = devices(tmp_path, HYBRID)
    assert slower_cpus(EIGHT, root) == {4, 5, 6, 7}
    assert slower_cpus(frozenset({2, 5}), root) == {5}
    assert not slower_cpus(frozenset({4, 5}), root)
    assert not slower_cpus(frozenset({0, 1}), root)


def test_cpus_of_less_capacity_are_slower(tmp_path: Path) -> None:
    root = devices(tmp_path, CAPACITIES)
    assert slower_cpus(EIGHT, root) == {6, 7}
    assert not slower_cpus(frozenset({6, 7}), root)


def test_nodes_are_those_of_cpus_that_may_be_used(tmp_path: Path) -> None:
    root = devices(tmp_path, NODES)
    assert num_memory_nodes(EIGHT, root) == 2
    assert num_memory_nodes(frozenset({0, 5}), root) == 1


def test_nothing_is_said_of_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert remarks(EIGHT, tmp_path) == ()
    assert num_memory_nodes(EIGHT, tmp_path) == 1


def test_the_number_of_threads_comes_with_what_differs_among_their_cpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = devices(tmp_path, HYBRID | NODES)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "usable_cpus", lambda: EIGHT)
    monkeypatch.setattr(threads, "num_cores", len)
    monkeypatch.setattr(threads, "cpu_quota", lambda: None)
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(threads, "remarks", lambda cpus: remarks(cpus, root))
    chosen = threads.choose_threads()
    assert chosen.count == 8
    assert "4 of the CPUs are slower ones" in chosen.reason
    assert "in 2 NUMA nodes" in chosen.reason
    assert "numactl --interleave=all" in chosen.reason
