"""GEMMs by AMX tiles on CPUs that have none: host_amx has the instructions in plain C++."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.custom_ops._shared import cpu_kernel
from lamina.custom_ops._shared.build import CSRC
from lamina.custom_ops.add_rms_norm_linear import _cpu as add_rms_norm_linear
from lamina.custom_ops.add_rms_norm_linear import reference
from lamina.custom_ops.linear import _cpu as linear
from lamina.custom_ops.linear.choices import Method
from lamina.custom_ops.linear_w4a16 import _cpu as linear_w4a16

from .guarded import at_the_end, making_ended
from .host_kernels import COMPILER

TILES = Path(__file__).resolve().parent / "host_amx" / "tiles.h"
CPUINFO = Path("/proc/cpuinfo")
OPS = {"linear": linear, "add_rms_norm_linear": add_rms_norm_linear, "linear_w4a16": linear_w4a16}
# tokens, rows, columns: parts of tiles, strips and blocks; the last are more tokens than are packed at once
SHAPES = [
    *((1, 17, 40), (3, 64, 256), (16, 33, 512), (20, 20, 96), (32, 130, 1056), (33, 96, 64), (70, 50, 100)),
    *((5, 40, 4128), (32, 17, 2080), (40, 17, 2080), (530, 34, 32)),
]
THREADS = (1, 2, 3, 7)

pytestmark = pytest.mark.skipif(
    not (COMPILER and CPUINFO.exists() and "avx512_bf16" in CPUINFO.read_text()),
    reason="around tiles are vectors of AVX-512 with bfloat16",
)


def build_emulated(op: str, folder: Path) -> ctypes.CDLL:
    """The library of an op whose tiles are those of host_amx."""
    shutil.copytree(CSRC / "include", folder / "include")
    shutil.copy(TILES, folder / "include")
    library = folder / f"{op}.so"
    flags = ["-std=c++17", "-O1", "-march=native", "-D__AMX_BF16__=1", "-fno-gnu-unique", "-fPIC", "-shared"]
    sources = [f"-I{folder / 'include'}", str(CSRC / op / "cpu.cpp")]
    subprocess.run([str(COMPILER), *flags, *sources, "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module", autouse=True)
def _emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kernels of this module's ops are emulated ones, of threads of the pool that all kernels have."""
    linear.find_kernel()  # and with it the pool
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_kernel, "load_kernel", lambda op: build_emulated(op, tmp_path_factory.mktemp(op)))
        layouts = {"linear": "12q", "add_rms_norm_linear": "17qd", "linear_w4a16": "13q"}
        for name, op in OPS.items():
            kernel = cpu_kernel.CpuKernel(name, layouts[name])
            patch.setattr(op, "find_kernel", lambda kernel=kernel: kernel)
        yield


def make(*shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).bfloat16()


def make_operands(num_tokens: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    return make(num_tokens, columns), make(rows, columns, scale=max(columns, 1) ** -0.5), make(rows)


def on_threads(call: Callable[[], Any], num_threads: int) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return call()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_multiply_as_well_as_the_library(
    assert_close_to_reference: Callable[..., None], shape: tuple[int, int, int]
) -> None:
    x, weight, bias = make_operands(*shape)
    wide = F.linear(x.double(), weight.double(), bias.double())
    out = linear.launch(x, weight, bias, Method.AMX)
    assert_close_to_reference(out, wide, F.linear(x, weight, bias), floor=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_depend_on_no_threads_no_neighbours_and_no_layout(shape: tuple[int, int, int]) -> None:
    x, weight, bias = make_operands(*shape)
    out = on_threads(lambda: linear.launch(x, weight, bias, Method.AMX), 1)
    for num_threads in THREADS:
        assert torch.equal(on_threads(lambda: linear.launch(x, weight, bias, Method.AMX), num_threads), out)
    apart, wider = x.t().contiguous().t(), F.pad(weight, (0, 24))[:, : shape[2]]
    assert torch.equal(linear.launch(apart, wider, bias, Method.AMX), out)
    for token in {0, shape[0] // 2, shape[0] - 1}:
        alone = linear.launch(x[token : token + 1], weight, bias, Method.AMX)
        assert torch.equal(alone, out[token : token + 1])


@pytest.mark.parametrize("shape", [(3, 17, 40), (1, 1, 1), (20, 33, 33), (40, 33, 65)], ids=str)
def test_nothing_is_read_or_written_beyond_its_end(shape: tuple[int, int, int]) -> None:
    given = make_operands(*shape)
    ended = making_ended(given[0]), at_the_end(given[1]), at_the_end(given[2])
    assert torch.equal(linear.launch(*ended, Method.AMX), linear.launch(*given, Method.AMX))


def test_rows_without_columns_give_the_bias() -> None:
    x, weight, bias = make_operands(5, 17, 0)
    assert torch.equal(linear.launch(x, weight, bias, Method.AMX), bias.expand(5, 17))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_are_made_by_whoever_comes(
    assert_close_to_reference: Callable[..., None], shape: tuple[int, int, int], gated: bool
) -> None:
    (x, weight, bias), residual = make_operands(*shape), make(shape[0], shape[2], scale=3)
    weight, bias = weight[: shape[1] // 2 * 2], bias[: shape[1] // 2 * 2]
    arguments: tuple[Any, ...] = (x, residual, make(shape[2]), 1e-5, weight, bias, gated)
    wide: list[Any] = [a.double() if isinstance(a, Tensor) else a for a in arguments]
    out, total = on_threads(lambda: add_rms_norm_linear.launch(*arguments, Method.AMX), 1)
    naive, expected = reference.add_rms_norm_linear(*arguments)
    assert torch.equal(total, expected)
    assert_close_to_reference(out, reference.add_rms_norm_linear(*wide)[0], naive, floor=2e-5)
    for num_threads in THREADS:
        again = on_threads(lambda: add_rms_norm_linear.launch(*arguments, Method.AMX), num_threads)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], total)


def test_weights_of_four_bits_are_written_out_for_tiles() -> None:
    x, group = make(20, 64), 32
    weight = torch.randint(0, 256, (50, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    arguments: tuple[Any, ...] = (x, weight, make(50, 2, scale=0.1), None, make(50), group)
    tiles, dots = (linear_w4a16.launch(*arguments, method) for method in (Method.AMX, Method.DOT))
    torch.testing.assert_close(tiles, dots)
