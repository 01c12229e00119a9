"""How many threads are used: what was asked for, else cores, but never more than a container pays for."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from lamina.runtime.startup import threads
from lamina.runtime.startup.threads import choose_threads, num_cores, settle_threads


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Eight CPUs on four cores, no quota, nothing set, and torch as it starts."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "usable_cpus", lambda: frozenset(range(8)))
    monkeypatch.setattr(threads, "num_cores", lambda cpus: len(cpus) // 2)
    monkeypatch.setattr(threads, "cpu_quota", lambda: None)
    monkeypatch.setattr(threads, "remarks", lambda cpus: ())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    return monkeypatch


def test_a_core_each(machine: pytest.MonkeyPatch) -> None:
    assert choose_threads().count == 4
    assert choose_threads().reason == "as many as cores, for 8 CPUs; not bound to cores"


@pytest.mark.parametrize("quota,count", [(2.5, 2), (0.5, 1), (16.0, 4)])
def test_no_more_than_the_quota_pays_for(machine: pytest.MonkeyPatch, quota: float, count: int) -> None:
    machine.setattr(threads, "cpu_quota", lambda: quota)
    assert choose_threads().count == count
    assert ("control group" in choose_threads().reason) == (quota < 4)


def test_what_the_user_set_stays(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(threads, "cpu_quota", lambda: 1.0)
    machine.setattr(torch, "get_num_threads", lambda: 3)
    assert choose_threads().count == 3
    assert "torch.set_num_threads" in choose_threads().reason
    machine.setenv("OMP_NUM_THREADS", "3")
    machine.setenv("OMP_PROC_BIND", "close")
    assert choose_threads().count == 3
    assert choose_threads().reason == "OMP_NUM_THREADS=3 is set; OMP_PROC_BIND=close to cores"


def test_torch_is_told(machine: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    machine.setattr(torch, "set_num_threads", told.append)
    settle_threads()
    assert told == []
    machine.setattr(threads, "cpu_quota", lambda: 2.0)
    settle_threads()
    assert told == [2]


def test_siblings_are_one_core(tmp_path: Path) -> None:
    pairs = {f"cpu{cpu}/topology/thread_siblings_list": f"{cpu % 2},{cpu % 2 + 2}" for cpu in range(4)}
    write(tmp_path, pairs)
    assert num_cores(frozenset(range(4)), tmp_path) == 2
    assert num_cores(frozenset({1, 3}), tmp_path) == 1
    assert num_cores(frozenset({7, 8}), tmp_path) == 2  # of which nothing is known
