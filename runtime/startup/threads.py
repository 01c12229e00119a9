"""How many threads a step on the CPU uses, and why: what was asked for, else a core each that it may use."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ...common import env
from ...common.forks import lost_threads
from ...common.logging import get_logger, log_once
from .control_groups import cpu_quota, read
from .core_layout import remarks

logger = get_logger("runtime")
CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Threads:
    """A number of threads, with the reason for it."""

    count: int
    reason: str


def settle_threads(num_engines: int = 1) -> Threads:
    """Have torch, and our kernels with it, use the chosen number; returns it, logged once.

    num_engines: that share the machine, each in a process like this one.
    """
    chosen = choose_threads(num_engines)
    if lost_threads() and chosen.count > 1:
        why = "this process was forked from one whose threads did not come along; spawn it to use more"
        log_once(logger, logging.WARNING, f"threads on cpu: 1 ({why})")
        chosen = Threads(count=1, reason=why)
    if chosen.count != torch.get_num_threads():
        torch.set_num_threads(chosen.count)
    log_once(logger, logging.INFO, f"threads on cpu: {chosen.count} ({chosen.reason})")
    return chosen


def choose_threads(num_engines: int = 1) -> Threads:
    """What the user set, in the environment or by torch.set_num_threads, else one for each core at hand.

    A second thread of the same core only takes turns with the first, and one more than a container's quota
    pays for makes all others wait at every barrier. Slower cores are counted as others are: chunks of work
    are claimed, so that they take fewer. Threads stay where the system puts them unless
    OMP_PROC_BIND or OMP_PLACES binds them: other processes may use the same cores.
    """
    current, binding = torch.get_num_threads(), f"{env.omp_binding() or 'not bound'} to cores"
    asked = env.omp_threads()
    if asked is not None:
        return Threads(count=current, reason=f"{asked} is set; {binding}")
    cpus = usable_cpus()
    cores, quota = num_cores(cpus), cpu_quota()
    if current not in (cores, len(cpus), os.cpu_count()):
        return Threads(count=current, reason=f"set by torch.set_num_threads; {binding}")
    count, why = cores, f"as many as cores, for {len(cpus)} CPUs"
    if quota is not None and quota < count:
        count, why = max(1, int(quota)), f"what this control group may use of {cores} cores"
    if num_engines > 1:
        count, why = max(1, count // num_engines), f"{why}, shared by {num_engines} engines"
    return Threads(count=count, reason="; ".join((why, binding, *remarks(cpus))))


def usable_cpus() -> frozenset[int]:
    """The CPUs that the system lets this process run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def num_cores(cpus: frozenset[int], root: Path = CPUS) -> int:
    """Cores among CPUs: those that the system does not call siblings of another count, and those unknown."""
    siblings = {read(root / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in cpus}
    return max(1, len(siblings))
