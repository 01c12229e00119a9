"""The thread pool of kernels: every chunk once, whoever calls, forks, throws or does not come."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lamina.custom_ops._shared.build import CSRC, find_compiler
from lamina.custom_ops.linear import _cpu
from lamina.custom_ops.linear.choices import Method

STRESS = Path(__file__).with_name("thread_pool_stress.cpp")
TRIED = ["sizes", "callers", "nested", "exceptions", "absent", "entering", "forks"]
REST = Path(__file__).with_name("thread_rest.cpp")
RESTED = [
    "busy",
    "short-stops",
    "sleep",
    "longer-each-time",
    "never-longer-than-the-longest",
    "short-where-stops-are-rare",
    "longer-once-more",
    "short-after-long-quiet",
]
LIBRARIES = """
import os, torch
from lamina.custom_ops.linear import _cpu as one
from lamina.custom_ops.linear_int8 import _cpu as other
x, weight, scale = torch.ones(8, 512), torch.ones(4096, 512, dtype=torch.int8), torch.ones(4096)
wide = weight.float()
torch.set_num_threads(4)
one.load(), other.load()
before = len(os.listdir("/proc/self/task"))
one.launch(x, wide, None, one.Method.DOT)
other.launch(x, weight, scale, None, one.Method.DOT)
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_every_chunk_is_computed_once_whoever_calls_forks_throws_or_does_not_come(tmp_path: Path) -> None:
    assert said(tmp_path, STRESS, CSRC / "thread_pool" / "cpu.cpp") == TRIED


def test_a_thread_rests_where_another_process_has_its_cpu_and_only_there(tmp_path: Path) -> None:
    """Its callers are quicker without it: beside a busy process on each of two CPUs by a third."""
    assert said(tmp_path, REST) == RESTED


def said(folder: Path, *sources: Path) -> list[str]:
    """What a program of these sources prints, which names what it has tried."""
    program = folder / "program"
    flags = ["-std=c++17", "-O1", "-pthread", f"-I{CSRC / 'include'}", f"-I{CSRC / 'thread_pool'}"]
    subprocess.run([*find_compiler(), *flags, *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_no_kernel_has_threads_beside_those_of_the_pool() -> None:
    sources = [path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp") and "pool" not in path.stem]
    own = re.compile(r"#pragma omp|<omp\.h>|std::(thread|async)\b|pthread_create")
    found = [
        str(path) for path in sources if path.parent.name != "thread_pool" and own.search(path.read_text())
    ]
    assert sources
    assert found == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 5, 33, 600])
def test_the_bits_of_a_gemm_do_not_depend_on_the_number_of_threads(
    dtype: torch.dtype, num_tokens: int
) -> None:
    before = torch.get_num_threads()
    x, weight = torch.randn(num_tokens, 300).to(dtype), torch.randn(700, 300).to(dtype)
    found = []
    try:
        for num_threads in (1, 2, 3, 16):
            torch.set_num_threads(num_threads)
            found.append(_cpu.launch(x, weight, None, Method.DOT))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], one) for one in found)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted by Linux")
def test_all_kernels_share_the_threads_of_one_pool() -> None:
    result = subprocess.run(
        [sys.executable, "-c", LIBRARIES], capture_output=True, text=True, check=True, env=os.environ
    )
    assert result.stdout.split() == ["3"]
