"""What differs among the CPUs at hand, as Linux has it: cores that are slower, and nodes of memory."""

from pathlib import Path

from .control_groups import read

DEVICES = Path("/sys/devices")


def parse_cpu_list(text: str) -> frozenset[int]:
    """The CPUs of a list as the kernel writes it, "0-3,8"; none of what is no such list."""
    cpus: set[int] = set()
    for run in filter(None, text.strip().split(",")):
        first, dash, last = run.partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal():
            return frozenset()
        cpus |= set(range(int(first), int(last) + 1))
    return frozenset(cpus)


def slower_cpus(cpus: frozenset[int], devices: Path = DEVICES) -> frozenset[int]:
    """Those that the system calls slower than others among these: efficient cores beside fast ones.

    Intel's hybrid CPUs have them listed, others a capacity each.
    """
    fast, efficient = (
        parse_cpu_list(read(devices / kind / "cpus") or "") & cpus for kind in ("cpu_core", "cpu_atom")
    )
    if fast and efficient:
        return efficient
    found = {cpu: read(devices / "system" / "cpu" / f"cpu{cpu}" / "cpu_capacity") or "" for cpu in cpus}
    capacities = {cpu: int(text) for cpu, text in found.items() if text.strip().isdecimal()}
    most = max(capacities.values(), default=0)
    return frozenset(cpu for cpu, capacity in capacities.items() if capacity < most)


def num_memory_nodes(cpus: frozenset[int], devices: Path = DEVICES) -> int:
    """NUMA nodes that have some of these CPUs; 1 where the system names none."""
    lists = (devices / "system" / "node").glob("node[0-9]*/cpulist")
    return max(1, sum(bool(parse_cpu_list(read(path) or "") & cpus) for path in lists))


def remarks(cpus: frozenset[int], devices: Path = DEVICES) -> tuple[str, ...]:
    """What a user should know of these CPUs, in words that follow a number of threads."""
    slower, nodes = slower_cpus(cpus, devices), num_memory_nodes(cpus, devices)
    found = []
    if slower:
        found.append(f"{len(slower)} of the CPUs are slower ones, which take less of the work")
    if nodes > 1:
        found.append(
            f"in {nodes} NUMA nodes, which are treated alike: for the bandwidth of all, run a process a "
            "node (numactl --cpunodebind=0 --membind=0) or spread memory (numactl --interleave=all)"
        )
    return tuple(found)
