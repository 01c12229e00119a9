"""CUDA kernels are compiled once a GPU, by the nvcc asked for; here a stand-in compiles them as C++."""

import contextlib
import ctypes
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lamina.common.errors import KernelBuildError, KernelLaunchError
from lamina.common.store import Store
from lamina.custom_ops._shared import build
from lamina.custom_ops._shared import build_cuda as module
from lamina.custom_ops._shared.build_cuda import build_cuda, find_nvcc
from lamina.custom_ops._shared.cuda_kernel import CudaKernel
from lamina.custom_ops._shared.ledger import Ledger

NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "a stand-in for nvcc"; exit; fi
echo "$@" >> "$0.log"
for word; do case $word in -I*) include=$word;; *.cu) source=$word;; *.so) target=$word;; esac; done
c++ -x c++ -fPIC -shared "$include" "$source" -o "$target"
"""


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A csrc/ with one small op, which no runtime of this process knows."""
    monkeypatch.setattr(build, "LEDGER", Ledger())
    folder = tmp_path / "csrc"
    (folder / "op").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "op" / "cuda.cu").write_text(
        '#include "shared.cuh"\nextern "C" int answer() { return ANSWER; }\n'
    )
    (folder / "include" / "shared.cuh").write_text("#define ANSWER 42\n")
    return folder


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler in CUDA_HOME, which notes each of its runs in nvcc.log."""
    path = tmp_path / "toolkit" / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(NVCC)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    return path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store")


def runs(nvcc: Path) -> list[str]:
    return Path(f"{nvcc}.log").read_text().splitlines()


def test_a_kernel_is_built_once_for_each_architecture(csrc: Path, store: Store, nvcc: Path) -> None:
    built = [build_cuda("op", arch, csrc, store) for arch in ("sm_80", "sm_90", "sm_80", "sm_90")]
    assert ctypes.CDLL(str(built[0])).answer() == 42
    assert [line.count(arch) for line, arch in zip(runs(nvcc), ("sm_80", "sm_90"), strict=True)] == [1, 1]


def test_a_changed_header_is_another_kernel_and_a_changed_cpu_source_is_not(
    csrc: Path, store: Store, nvcc: Path
) -> None:
    build_cuda("op", "sm_90", csrc, store)
    (csrc / "op" / "cpu.cpp").write_text("// none of nvcc's business\n")
    build_cuda("op", "sm_90", csrc, store)
    assert len(runs(nvcc)) == 1
    (csrc / "include" / "shared.cuh").write_text("#define ANSWER 43\n")
    assert ctypes.CDLL(str(build_cuda("op", "sm_90", csrc, store))).answer() == 43


def test_a_failure_shows_the_first_error(csrc: Path, store: Store, nvcc: Path) -> None:
    (csrc / "op" / "cuda.cu").write_text("int first = unknown_one;\nint second = unknown_two;\n")
    with pytest.raises(KernelBuildError, match=r"CUDA kernel of op did not compile: .*unknown_one") as caught:
        build_cuda("op", "sm_90", csrc, store)
    assert "unknown_two" not in str(caught.value)


def test_a_toolkit_without_nvcc_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(KernelBuildError, match="has no bin/nvcc; correct or unset it"):
        find_nvcc()


def test_a_machine_without_nvcc_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module, "TOOLKIT", tmp_path)
    with pytest.raises(KernelBuildError, match="install the CUDA toolkit or set CUDA_HOME"):
        find_nvcc()


def test_each_device_runs_what_was_compiled_for_it(
    csrc: Path, store: Store, nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs of two architectures in a process: a cubin of one is none for the other."""
    architectures, current = ["sm_80", "sm_90a"], [0]

    @contextlib.contextmanager
    def on_device(device: int | torch.device) -> Iterator[None]:
        before, current[0] = current[0], device if isinstance(device, int) else device.index
        yield
        current[0] = before

    class Stream:
        cuda_stream = 0

    (csrc / "op" / "cuda.cu").write_text("""
extern "C" long op_arguments_size() { return 8; }
extern "C" const char* lamina_error_string(int) { return "refused"; }
extern "C" int op(const void*) { return NUMBER; }
""")
    nvcc.write_text(NVCC.replace("-shared", '-DNUMBER=$(echo "$*" | grep -c code=sm_90a) -shared'))
    monkeypatch.setattr(module, "CSRC", csrc)
    monkeypatch.setattr(module, "LEDGER", SimpleNamespace(store=store))
    monkeypatch.setattr(module, "device_architecture", lambda: architectures[current[0]])
    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    kernel = CudaKernel("op", "")
    for _ in range(2):
        kernel(torch.device("cuda", 0))
        with pytest.raises(KernelLaunchError, match="op: refused"):
            kernel(torch.device("cuda", 1))
    assert len([line for line in runs(nvcc) if "gencode" in line]) == 2


BUILD = """
import os, sys, traceback
from pathlib import Path
from lamina.common.store import Store
from lamina.custom_ops._shared.build_cuda import build_cuda
children = []
for _ in range(4):
    children.append(os.fork())
    if not children[-1]:
        try:
            build_cuda("op", "sm_90", Path(sys.argv[1]), Store(sys.argv[2]))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def test_four_processes_at_once_run_one_compiler_and_have_the_kernel(
    csrc: Path, store: Store, nvcc: Path
) -> None:
    nvcc.write_text(NVCC.replace("\nc++", "\nsleep 0.3\nc++"))  # so that all of them come to the lock
    command = [sys.executable, "-c", BUILD, str(csrc), str(store.root)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len([line for line in runs(nvcc) if "gencode" in line]) == 1
    assert ctypes.CDLL(str(build_cuda("op", "sm_90", csrc, store))).answer() == 42
