"""How many threads a step on the CPU uses, and why: what was asked for, else a core each that it may use."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ..common import env
from ..common.logging import get_logger, log_once

logger = get_logger("runtime")
CPUS = Path("/sys/devices/system/cpu")
CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, kw_only=True, slots=True)
class Threads:
    """A number of threads, with the reason for it."""

    count: int
    reason: str


def settle_threads() -> Threads:
    """Have torch, and our kernels with it, use the chosen number; it is said once."""
    chosen = choose_threads()
    if chosen.count != torch.get_num_threads():
        torch.set_num_threads(chosen.count)
    log_once(logger, logging.INFO, f"threads on cpu: {chosen.count} ({chosen.reason})")
    return chosen


def choose_threads() -> Threads:
    """What the user set, in the environment or by torch.set_num_threads, else one for each core at hand.

    A second thread of the same core only takes turns with the first, and one more than a container's quota
    pays for makes all others wait at every barrier. Threads stay where the system puts them unless
    OMP_PROC_BIND or OMP_PLACES binds them: other processes may use the same cores.
    """
    current, binding = torch.get_num_threads(), f"{env.omp_binding() or 'not bound'} to cores"
    asked = env.omp_threads()
    if asked is not None:
        return Threads(count=current, reason=f"{asked} is set; {binding}")
    cpus = usable_cpus()
    cores, quota = num_cores(cpus), cgroup_quota()
    if current not in (cores, len(cpus), os.cpu_count()):
        return Threads(count=current, reason=f"set by torch.set_num_threads; {binding}")
    count, why = cores, f"as many as cores, for {len(cpus)} CPUs"
    if quota is not None and quota < count:
        count, why = max(1, int(quota)), f"what this control group may use of {cores} cores"
    return Threads(count=count, reason=f"{why}; {binding}")


def usable_cpus() -> frozenset[int]:
    """The CPUs that the system lets this process run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def num_cores(cpus: frozenset[int], root: Path = CPUS) -> int:
    """Cores among CPUs: those that the system does not call siblings of another count, and those unknown."""
    siblings = {_read(root / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in cpus}
    return max(1, len(siblings))


def cgroup_quota(root: Path = CGROUPS, own: Path = OWN_GROUPS) -> float | None:
    """CPUs' worth of time that the tightest control group around this process may use, None for no limit."""
    quotas = []
    for line in (_read(own) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # the unified hierarchy
            quotas += [_quota(*(_read(group / "cpu.max") or "").split()) for group in _around(root, path)]
        elif "cpu" in controllers.split(","):
            groups = _around(root / controllers, path)
            quotas += [
                _quota(_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us"))
                for group in groups
            ]
    return min((quota for quota in quotas if quota is not None), default=None)


def _around(root: Path, path: str) -> list[Path]:
    """A group's folder and those that hold it."""
    own = root / path.strip("/")
    return [own, *(folder for folder in own.parents if folder.is_relative_to(root))]


def _quota(quota: str | None = None, period: str | None = None) -> float | None:
    """Time a period, as a number of CPUs; "max" or -1 is no limit."""
    if quota in (None, "max", "-1") or period in (None, "0"):
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
