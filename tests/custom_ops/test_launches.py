"""What launchers ask of CUDA, on devices that are none: shared memory, early starts, configs, errors."""

import ctypes
import itertools
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from lamina.custom_ops._shared.build import CSRC
from lamina.custom_ops.linear.choices import GemmConfig, candidates, sites_of
from lamina.custom_ops.linear.gemm_config import MAX_CLUSTER, MAX_STAGES, MOST_PACE

from . import host_kernels

FAKE = Path(__file__).resolve().parent / "fake_cuda"
KERNELS = 48 << 10  # bytes that any kernel may have
ALL = (227 << 10) - (1 << 10)  # that the fake devices give a kernel of 1 KiB of its own
WRONG = 1  # cudaErrorInvalidValue
pytestmark = pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of csrc's launchers over a fake of CUDA."""
    library = tmp_path_factory.mktemp("launches") / "launches.so"
    flags = ["-std=c++17", "-fPIC", "-shared", "-w", "-fno-gnu-unique", f"-I{FAKE}", f"-I{CSRC / 'include'}"]
    source = str(FAKE / "launches.cpp")
    subprocess.run([str(host_kernels.COMPILER), *flags, source, "-o", str(library)], check=True)
    return library


@pytest.fixture
def launches(built: Path, tmp_path: Path) -> ctypes.CDLL:
    """These launchers, which have launched nothing yet: a copy of the file has globals of its own."""
    found = ctypes.CDLL(str(shutil.copy(built, tmp_path)))
    found.launch.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int]
    return found


def test_shared_memory_is_allowed_once_a_device_and_kernel_and_all_of_it(launches: ctypes.CDLL) -> None:
    """A launch that needs less must not take from one that needs more and is about to be launched."""
    for device, kernel in itertools.product((0, 1), (0, 1)):
        launches.set_device(device)
        assert launches.launch(kernel, ALL, 1) == WRONG
        assert [launches.allow(kernel) for _ in range(3)] == [0, 0, 0]
        assert launches.launch(kernel, KERNELS, 1) == 0
        assert launches.launch(kernel, ALL, 1) == 0
    assert launches.num_settings() == 4


def test_a_launch_that_fails_leaves_no_error_to_others(launches: ctypes.CDLL) -> None:
    assert launches.launch(0, 1 << 20, 1) == WRONG
    assert launches.last_error() == 0


def test_a_kernel_begins_early_in_graphs_alone_and_in_its_cluster(launches: ctypes.CDLL) -> None:
    for is_active, cluster in itertools.product((0, 1), (1, 4)):
        launches.set_capture(is_active, 0)
        assert launches.launch(0, 0, cluster) == 0
        assert (launches.is_pdl(), launches.num_cluster()) == (is_active, cluster)


def test_what_is_wrong_with_a_stream_is_reported_by_the_launch_that_met_it(launches: ctypes.CDLL) -> None:
    launches.set_capture(0, 906)
    assert launches.launch(0, 0, 1) == 906
    assert launches.num_launches() == 0
    assert launches.last_error() == 0


def test_the_kernel_takes_the_cuts_that_are_measured_and_no_uneven_one(launches: ctypes.CDLL) -> None:
    def takes(config: GemmConfig, is_gated: bool) -> bool:
        return bool(launches.takes(struct.pack("6q", *config), int(is_gated)))

    for site in sites_of("norm_gated", 4096, 4096):
        for config in candidates(site, 132):
            assert takes(config, site.kind == "gated") or config.clusters
    for site in sites_of("linear", 4096, 4096, weights="fp8"):
        for config in candidates(site, 132):
            assert launches.takes_fp8(struct.pack("6q", *config)) or config.clusters
    for share, split, stages in itertools.product(range(-1, 20), range(-1, 20), (0, 1, 2, MAX_STAGES, 99)):
        is_even = {share, split} <= {1, 2, 4, 8} and share * split <= MAX_CLUSTER
        right = is_even and share * 8 <= 32 and 2 <= stages <= MAX_STAGES
        assert takes(GemmConfig(2, 32, share, split, stages), False) == right
    for pace in range(-1, 20):
        assert takes(GemmConfig(1, 8, 1, 1, 12, pace), False) == (0 <= pace <= MOST_PACE)
