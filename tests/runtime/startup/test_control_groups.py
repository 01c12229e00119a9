"""Limits of control groups: either version, nested, seen from inside a container; CPUs and memory."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from lamina import ConfigError
from lamina.runtime.startup import control_groups, memory
from lamina.runtime.startup.control_groups import cpu_quota, memory_left, memory_limit

from .resolving import resolve_alone

MIB = 1 << 20


def write(root: Path, files: Mapping[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def test_the_tightest_group_around_the_process_counts(tmp_path: Path) -> None:
    own = write(tmp_path, {"own": "0::/a/b"}) / "own"
    root = write(tmp_path / "groups", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"})
    assert cpu_quota(root, own) == 1.5
    write(root, {"a/b/cpu.max": "50000 100000"})
    assert cpu_quota(root, own) == 0.5
    assert cpu_quota(tmp_path / "nowhere", own) is None


def test_groups_of_the_first_version_count_too(tmp_path: Path) -> None:
    own = write(tmp_path, {"own": "4:memory:/m\n2:cpu,cpuacct:/job"}) / "own"
    files = {"cpu.cfs_quota_us": "300000", "cpu.cfs_period_us": "100000"}
    root = write(tmp_path / "groups", {f"cpu,cpuacct/job/{name}": text for name, text in files.items()})
    assert cpu_quota(root, own) == 3
    write(root, {"cpu,cpuacct/job/cpu.cfs_quota_us": "-1"})
    assert cpu_quota(root, own) is None


def v2(limit: object, used: int, **stat: int) -> dict[str, object]:
    lines = "\n".join(f"{name} {value}" for name, value in stat.items())
    return {"memory.max": limit, "memory.current": used, "memory.stat": lines or "anon 5"}


def v1(limit: int, used: int, **stat: int) -> dict[str, object]:
    lines = "\n".join(f"{name} {value}" for name, value in stat.items())
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": lines}


def within(group: str, files: Mapping[str, object]) -> dict[str, object]:
    return {f"{group}/{name}": text for name, text in files.items()}


NONE = 9223372036854771712  # how the first version writes that there is no limit
TREES = {
    "v2": ("0::/job", within("job", v2(600 * MIB, 100 * MIB)), 600, 500),
    "v2, files that were read": (
        "0::/job",
        within("job", v2(600 * MIB, 100 * MIB, inactive_file=60 * MIB)),
        600,
        560,
    ),
    "v2, no limit": ("0::/job", within("job", v2("max", 100 * MIB)), None, None),
    "v2, high": ("0::/job", within("job", v2("max", 100 * MIB) | {"memory.high": 300 * MIB}), 300, 200),
    "v2, a container's own root": ("0::/", v2(600 * MIB, 100 * MIB), 600, 500),
    "v2, outside of what is seen": ("0::/../../host", v2(600 * MIB, 100 * MIB), 600, 500),
    "v2, nested, outer is tighter": (
        "0::/a/b",
        within("a", v2(600 * MIB, 500 * MIB)) | within("a/b", v2(400 * MIB, 100 * MIB)),
        400,
        100,
    ),
    "v2, beside v1": (
        "3:cpuset:/\n0::/job",
        within("unified/job", v2(600 * MIB, 100 * MIB)),
        600,
        500,
    ),
    "v2, beyond its limit": ("0::/job", within("job", v2(600 * MIB, 700 * MIB)), 600, 0),
    "v1": ("4:memory:/job", within("memory/job", v1(600 * MIB, 100 * MIB)), 600, 500),
    "v1, no limit": ("4:memory:/job", within("memory/job", v1(NONE, 100 * MIB)), None, None),
    "v1, path of the host": ("4:memory:/docker/ab", within("memory", v1(600 * MIB, 100 * MIB)), 600, 500),
    "v1, limit of a group that is not seen": (
        "4:memory:/",
        within("memory", v1(NONE, 100 * MIB, hierarchical_memory_limit=600 * MIB)),
        600,
        500,
    ),
    "v1, files that were read": (
        "4:memory:/job",
        within("memory/job", v1(600 * MIB, 100 * MIB, inactive_file=1, total_inactive_file=60 * MIB)),
        600,
        560,
    ),
    "v1, several controllers": ("4:hugetlb,memory:/", within("hugetlb,memory", v1(MIB, 0)), 1, 1),
    "nothing": ("", {}, None, None),
    "odd": ("0::/job", within("job", {"memory.max": "", "memory.current": "x"}), None, None),
}


@pytest.mark.parametrize("case", TREES)
def test_memory_that_is_left_is_the_tightest_groups(tmp_path: Path, case: str) -> None:
    own, files, limit, left = TREES[case]
    write(tmp_path, {"own": own})
    root = write(tmp_path / "groups", files)
    assert memory_limit(root, tmp_path / "own") == (None if limit is None else limit * MIB)
    assert memory_left(root, tmp_path / "own") == (None if left is None else left * MIB)


@pytest.fixture
def limited_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of 600 MiB, 100 used."""
    root = write(tmp_path, v2(600 * MIB, 100 * MIB))
    monkeypatch.setattr(control_groups, "_tightest", tightest_of(root))


def tightest_of(root: Path):
    return lambda finds, *_: finds[control_groups.UNIFIED](root)


def test_a_limit_sizes_the_cache_is_checked_and_is_told(limited_to, make_tiny_folder) -> None:
    from lamina.cli.info import describe_machine
    from lamina.models.config import read_model_config
    from lamina.runtime.config import RuntimeConfig
    from lamina.runtime.startup.memory_report import size

    model = read_model_config(make_tiny_folder())
    cpu = torch.device("cpu")
    assert memory.available_bytes(cpu) == 500 * MIB
    config = RuntimeConfig(model="tiny", max_num_seqs=100000, max_num_batched_tokens=8192)
    resolved = resolve_alone(config, model, torch.float32, cpu)
    assert resolved.num_kv_blocks * memory.block_bytes(model, 16, torch.float32) <= 450 * MIB
    assert size(resolved).available_bytes == 500 * MIB
    too_many = RuntimeConfig(model="tiny", num_kv_blocks=100_000)
    with pytest.raises(ConfigError, match=r"available by the limit of this control group, 0\.6 GiB"):
        resolve_alone(too_many, model, torch.float32, cpu)
    facts = describe_machine()
    assert (facts["memory_limit_gib"], facts["memory_available_gib"]) == (0.59, 0.49)


def test_an_address_space_limit_counts_too() -> None:
    code = (
        "import resource, torch; from lamina.runtime.startup import memory\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20), resource.RLIM_INFINITY))\n"
        "assert memory.available_bytes(torch.device('cpu')) <= 300 << 20"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
