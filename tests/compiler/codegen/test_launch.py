"""Triton kernels out of the store: the facts that launch them, and sources that need no Inductor."""

import ctypes
import json
from types import SimpleNamespace

import pytest
import torch

from lamina.common.errors import KernelLaunchError
from lamina.compiler.codegen import launch, torch_wrapper, wrapper
from lamina.compiler.codegen.launch import Launcher, kernels_of, read_kernel

CPU = torch.device("cpu")
ARGUMENTS = ["in_ptr0", "out_ptr0", "ynumel", "xnumel", "YBLOCK", "XBLOCK"]
SOURCE = """
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._C import _cuda_getCurrentRawStream as get_raw_stream
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
async_compile = AsyncCompile()
fused = async_compile.triton("fused", "...", device_str="cuda")
async_compile.wait(globals())
del async_compile
class Runner:
    def __init__(self, partitions):
        self.partitions = partitions
    def call(self, args):
        arg0_1, = args
        args.clear()
        u0 = arg0_1.size()[0]
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((u0, 4), (4, 1), torch.float32)
            stream0 = get_raw_stream(0)
            fused.run(arg0_1, buf0, u0, 4, stream=stream0)
        return (buf0, )
runner = Runner(partitions=[])
call = runner.call
"""
VALUES = {
    "torch._C._cuda_getCurrentRawStream": lambda index: 7 + index,
    "torch._C._dynamo.guards._empty_strided_cuda": lambda *layout: torch.empty(4),
}


@pytest.fixture
def cubins(tmp_path, monkeypatch):
    """A folder as Triton keeps one, with the cubin of `fused`."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    (tmp_path / "triton" / "HASH").mkdir(parents=True)
    (tmp_path / "triton" / "HASH" / "fused.cubin").write_bytes(b"cubin")


def tuner(grid_type="Grid2D", types="OOii", constants=(4, 5), forms=1, **meta):
    """What Inductor has of a kernel of two pointers and two sizes."""
    kernel = SimpleNamespace(
        name="fused",
        arg_names=ARGUMENTS,
        arg_tys=types,
        declared_constexprs=[4, 5],
        full_constexprs=list(constants),
        num_warps=4,
        shared=64,
        has_global_scratch=True,
        has_profile_scratch=True,
    )
    launcher = SimpleNamespace(config=SimpleNamespace(kwargs={"XBLOCK": 32, "YBLOCK": 8}), cache_hash="HASH")
    return SimpleNamespace(
        fn=SimpleNamespace(__name__="fused"),
        compile_results=[SimpleNamespace(kernel=kernel)] * forms,
        launchers=[launcher] * forms,
        inductor_meta={"grid_type": grid_type, **meta},
    )


def test_the_facts_of_a_kernel_survive_as_json(cubins, store):
    found = kernels_of({"fused": tuner(), "other": 3}, store)["fused"]
    assert store.get(found.cubin) == b"cubin"
    assert (found.arguments, found.num_scratch) == ((0, 1, 2, 3), 2)
    assert found.grid == ((3, 32), (2, 8))
    assert read_kernel(json.loads(json.dumps(found.as_record()))) == found


def test_an_argument_that_is_constant_in_the_kernel_is_not_passed(cubins, store):
    found = kernels_of({"fused": tuner(types="OOi", constants=(3, 4, 5))}, store)["fused"]
    assert found.arguments == (0, 1, 2)


@pytest.mark.parametrize(
    "odd",
    [
        {"grid_type": "SplitScanGrid"},
        {"types": "OOif"},
        {"forms": 2},
        {"extra_launcher_args": ["grid_0"]},
    ],
    ids=str,
)
def test_what_is_not_plain_is_left_to_inductor(cubins, store, odd):
    assert kernels_of({"fused": tuner(**odd)}, store) == {}


class Driver:
    """Takes launches, and fails when asked to."""

    def __init__(self, status=0):
        self.status, self.launches = status, []

    def cuLaunchKernel(self, function, *arguments):
        places = arguments[8]
        values = [ctypes.c_uint64.from_address(place).value for place in places]
        self.launches.append((function, *arguments[:7], arguments[7].value, values))
        return self.status

    def cuGetErrorString(self, status, text):
        text._obj.value = b"out of something"
        return 0


@pytest.fixture
def driver(monkeypatch):
    """A stand-in for the CUDA driver."""
    stand_in = Driver()
    monkeypatch.setattr(launch, "driver", lambda: stand_in)
    monkeypatch.setattr(launch, "_load", lambda *arguments: "function")
    return stand_in


def test_a_launch_has_its_grid_its_values_and_null_for_scratch(cubins, store, driver):
    kernel = kernels_of({"fused": tuner()}, store)["fused"]
    source, target = torch.ones(4), torch.ones(4)
    Launcher(kernel, store, CPU).run(source, target, 17, 33, stream=9)
    values = [source.data_ptr(), target.data_ptr(), 17, 33, 0, 0]
    assert driver.launches == [("function", 2, 3, 1, 128, 1, 1, 64, 9, values)]


def test_a_refused_launch_names_the_kernel_and_the_drivers_words(cubins, store, driver):
    kernel = kernels_of({"fused": tuner()}, store)["fused"]
    driver.status = 2
    with pytest.raises(KernelLaunchError, match=r"launch of fused: out of something \(CUDA error 2\)"):
        Launcher(kernel, store, CPU).run(torch.ones(1), torch.ones(1), 1, 1, stream=0)


def test_a_generated_source_runs_on_the_gpu_at_hand(cubins, store, driver, monkeypatch):
    known = torch_wrapper.wrapper_values()
    monkeypatch.setattr(torch_wrapper, "wrapper_values", lambda: known | VALUES)
    devices = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(torch.cuda, "_DeviceGuard", Guard)
    assert wrapper.obstacle(SOURCE, {"fused"}) is None
    assert wrapper.obstacle(SOURCE, ()) == "it uses fused"
    record = kernels_of({"fused": tuner()}, store)["fused"].as_record()
    digest = store.put(SOURCE.encode())
    call = wrapper.load_source(digest, {}, {"fused": record}, store, torch.device("cuda", 3))
    call([torch.ones(5, 4)])
    assert devices == [3]
    assert driver.launches[0][8] == 10, "the stream of GPU 3"


class Guard:
    """Stands for the choice of a GPU."""

    def __init__(self, index):
        assert index == 3

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None
