"""What the control groups around this process let it have, by either version of them; None: no limit."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
UNIFIED = ""  # what stands for the controllers of the second version


def cpu_quota(root: Path = ROOT, own: Path = OWN) -> float | None:
    """CPUs' worth of time that the tightest group may use."""
    return _tightest({UNIFIED: _cpu_max, "cpu": _cpu_quota}, root, own)


def memory_limit(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Bytes that the group with the lowest limit may have in all."""
    limits = {UNIFIED: _memory_max, "memory": _memory_limit_in_bytes}
    limit = _tightest(limits, root, own)
    return None if limit is None else int(limit)


def memory_left(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Bytes that can be had yet in the group where they are fewest; files only read do not count."""

    def left(find: Callable[[Path], float | None], used_file: str) -> Callable[[Path], float | None]:
        def of_group(group: Path) -> float | None:
            limit, used = find(group), _number(read(group / used_file))
            return None if limit is None or used is None else max(0, limit - used + _idle_files(group))

        return of_group

    finds = {
        UNIFIED: left(_memory_max, "memory.current"),
        "memory": left(_memory_limit_in_bytes, "memory.usage_in_bytes"),
    }
    found = _tightest(finds, root, own)
    return None if found is None else int(found)


def _tightest(finds: Mapping[str, Callable[[Path], float | None]], root: Path, own: Path) -> float | None:
    """The lowest limit of all groups around this process, each found by what knows its controller."""
    found = []
    for line in (read(own) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in finds.keys() & set(controllers.split(",")):
            found += [finds[controller](group) for group in _around(root, controllers, path)]
    return min((limit for limit in found if limit is not None), default=None)


def _around(root: Path, controllers: str, path: str) -> Iterator[Path]:
    """A group's folder and those that hold it; a container sees its own as the root of all."""
    tops = (root, root / "unified") if controllers == UNIFIED else (root / controllers,)
    for top in tops:
        group = top / path.strip("/")
        yield from (group, *(folder for folder in group.parents if folder.is_relative_to(top)))


def _cpu_max(group: Path) -> float | None:
    return _quota(*(read(group / "cpu.max") or "").split())


def _cpu_quota(group: Path) -> float | None:
    return _quota(read(group / "cpu.cfs_quota_us"), read(group / "cpu.cfs_period_us"))


def _quota(quota: str | None = None, period: str | None = None) -> float | None:
    """Time a period, as a number of CPUs; "max" or -1 is no limit."""
    most, each = _number(quota), _number(period)
    return None if most is None or not each else most / each


def _memory_max(group: Path) -> float | None:
    """Beyond memory.high a group is slowed down to a crawl, so that it counts as its limit, too."""
    limits = [_number(read(group / name)) for name in ("memory.max", "memory.high")]
    return min((limit for limit in limits if limit is not None), default=None)


def _memory_limit_in_bytes(group: Path) -> float | None:
    """The lowest of the group and of those that hold it, which a container may not see."""
    limits = [_number(read(group / "memory.limit_in_bytes")), _stat(group, "hierarchical_memory_limit")]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known and min(known) < 1 << 60 else None  # beyond: the kernel's word for none


def _idle_files(group: Path) -> int:
    """Bytes of files that were read and that the kernel drops first."""
    found = (_stat(group, name) for name in ("total_inactive_file", "inactive_file"))
    return next((value for value in found if value is not None), 0)


def _stat(group: Path, name: str) -> int | None:
    lines = (read(group / "memory.stat") or "").splitlines()
    return next((_number(line.split()[-1]) for line in lines if line.split()[:1] == [name]), None)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def read(path: Path) -> str | None:
    """The text of a small file, None where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
