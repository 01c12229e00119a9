"""lamina::lora and adapters of a runtime on a GPU."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lamina import LoRAConfig, Runtime, SamplingParams
from lamina.custom_ops import rms_norm
from lamina.custom_ops._shared import registry
from lamina.custom_ops._shared.build import CSRC
from lamina.custom_ops._shared.build_cuda import device_architecture, find_nvcc
from lamina.custom_ops.linear import _cuda as gemm_kernel
from lamina.custom_ops.linear.choices import GemmConfig, persistent_stages
from lamina.custom_ops.linear_lora import _overlapped as overlapped
from lamina.custom_ops.lora import _cuda as lora_kernel

from ..adapters import write_adapter, write_merged
from ..custom_ops.test_lora import Operands, check, operands

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
PROMPTS = [[1, 5, 9, 20], [7, 8, 200, 31, 4, 4, 19], [3] * 21]


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != gemm_kernel.HOPPER,
    reason="the kernels are for compute capability 9.0",
)
every_provider = pytest.mark.parametrize("provider", ["cuda", "triton"])


def call_of(provider: str, dtype: torch.dtype) -> Callable[..., Any]:
    return registry.select("lora", device=DEVICE, dtype=dtype, provider=provider).call


def on_device(given: Operands) -> list[Any]:
    return [one.to(DEVICE) if isinstance(one, torch.Tensor) else one for one in given.each()]


@every_provider
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [(33,), (4096, 1024, 1024), (300, 7)], ids=str)
@pytest.mark.parametrize("rank", [1, 3, 16, 64])
@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_a_kernel_computes_what_the_formula_says(
    provider: str, dtype: torch.dtype, rows: tuple[int, ...], rank: int, num_tokens: int
) -> None:
    """Of rows that lie apart, one by one, and of contiguous ones, in vectors where the columns allow it."""
    for columns in (577, 1088):
        given = operands(num_tokens, columns, rows, dtype, rank=rank, seed=columns)
        given.slots[: num_tokens // 2] = 1  # neighbours with one slot, as those of a prompt
        for x in (given.x, given.x.contiguous()):
            own = Operands(*given.each(x=x))
            check(call_of(provider, dtype)(*on_device(own)).cpu(), own)


@pytest.mark.parametrize(
    ("num_tokens", "columns", "rows", "rank"),
    [
        (1, 4360, (4096,), 16),
        (32, 200, (14336, 14336), 16),
        (40, 4360, (4096, 4096), 8),
        (70, 16392, (2100, 9), 24),
        (260, 4096, (4096, 1024, 1024), 16),
    ],
    ids=str,
)
def test_tokens_of_eight_adapters_in_turn_get_what_theirs_add(
    num_tokens: int, columns: int, rows: tuple[int, ...], rank: int
) -> None:
    """Where tokens of an adapter are computed together, beside those of none."""
    given = operands(num_tokens, columns, rows, torch.bfloat16, rank=rank, num_slots=8)
    given.slots.copy_((torch.arange(len(given.slots)) + 4) % 9 - 1)
    own = Operands(*given.each(x=given.x.clone(memory_format=torch.contiguous_format)))
    check(call_of("cuda", torch.bfloat16)(*on_device(own)).cpu(), own)


@every_provider
@pytest.mark.parametrize("rank", [8, 17])
def test_a_token_has_the_bits_that_it_has_alone(provider: str, rank: int) -> None:
    """Beside few and many others, whose slots are other ones or its own."""
    call, given = call_of(provider, torch.bfloat16), operands(300, 1024, (520, 64), torch.bfloat16, rank=rank)
    given.slots[100:180] = 2
    y, x, *rest, slots, rows = on_device(Operands(*given.each(x=given.x.contiguous())))
    together = call(y, x, *rest, slots, rows)
    for first, last in ((0, 1), (99, 100), (104, 112), (120, 150), (299, 300)):
        part = slice(first, last)
        alone = call(y[part], x[part], *rest, slots[part].clone(), rows)
        assert torch.equal(alone, together[part])
    assert torch.equal(call(y, x, *rest, slots, rows), together)


@every_provider
def test_it_follows_the_kernels_ahead_of_it_in_a_graph(provider: str) -> None:
    """They write what it reads: replayed with other contents and slots, in a chain with norms."""
    call, dtype = call_of(provider, torch.bfloat16), torch.bfloat16
    given = operands(4, 2048, (2048,), dtype, rank=16)
    _, x, a, b, scales, slots, rows = on_device(Operands(*given.each(x=given.x.contiguous())))
    weight = torch.rand(2048, device=DEVICE, dtype=dtype)

    def chain(values: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            values = call(rms_norm(values, weight, 1e-5), values, a, b, scales, slots, rows)
        return values

    chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x.copy_(torch.randn(x.shape, generator=generator))
        slots.copy_(torch.randint(-1, len(a), slots.shape, generator=generator))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, chain(x))


def kernel_of_late_copies(folder: Path) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Copies by a kernel that lets the next one begin 50 us or so before it writes."""
    library = folder / "late_copy.so"
    source, flags = Path(__file__).with_name("late_copy.cu"), ("-std=c++17", "-shared", "-Xcompiler=-fPIC")
    own = device_architecture()
    target = f"-gencode=arch={own.replace('sm', 'compute')},code={own}"
    command = [find_nvcc(), *flags, target, f"-I{CSRC / 'include'}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    entry = ctypes.CDLL(str(library)).late_copy
    entry.argtypes = *([ctypes.c_void_p] * 2), *([ctypes.c_int64] * 2), ctypes.c_void_p

    def copy(from_: torch.Tensor, to: torch.Tensor) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        assert entry(from_.data_ptr(), to.data_ptr(), to.numel(), 100_000, stream) == 0

    return copy


class Beside(NamedTuple):
    """A projection with adapters: rows of x, its columns, outputs of each part, and the GEMM's kernel."""

    num_tokens: int
    columns: int
    rows: tuple[int, ...]
    gemm: GemmConfig


BESIDE = [
    Beside(1, 4096, (4096,), GemmConfig(1, 8, 1, 2, 12)),
    Beside(1, 4096, (14336, 14336), GemmConfig(1, 8, 1, 1, 6)),
    Beside(32, 4096, (4096, 1024, 1024), GemmConfig(1, 32, 1, 1, 9)),
    Beside(32, 4096, (14336, 14336), GemmConfig(2, 32, 2, 1, 5)),
    Beside(30, 14336, (4096,), GemmConfig(1, 32, 1, 2, 9)),
    Beside(20, 4096, (2100, 10), GemmConfig(1, 32, 1, 2, 9)),  # threads without neighbours
    Beside(8, 4096, (4096,), GemmConfig(2, 128, 1, 2, persistent_stages(2, 128), 66)),
]


class Captured(NamedTuple):
    """Late copies, each with a projection behind it that others are to find in a CUDA graph."""

    graph: torch.cuda.CUDAGraph
    sources: list[torch.Tensor]
    copies: list[torch.Tensor]
    results: list[torch.Tensor]

    def replay(self, seed: int) -> None:
        """With fresh numbers, over NaN."""
        generator = torch.Generator(DEVICE).manual_seed(seed)
        for source in self.sources:
            source.normal_(generator=generator)
        for one in (*self.copies, *self.results):
            one.fill_(torch.nan)
        self.graph.replay()


def captured(
    copy: Callable[[torch.Tensor, torch.Tensor], None], case: Beside, call: Callable[..., Any]
) -> Captured:
    shape = case.num_tokens, case.columns
    sources, copies = (
        [torch.zeros(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)] for _ in "ab"
    )
    call(copies[0])
    graph, results = torch.cuda.CUDAGraph(), []
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for source, x in zip(sources, copies, strict=True):
            copy(source, x)
            results.append(call(x))
    return Captured(graph, sources, copies, results)


@on_hopper
@pytest.mark.parametrize("promises_x", [True, False])
@pytest.mark.parametrize("case", BESIDE, ids=str)
def test_adapters_begin_beside_the_projection_and_not_before_its_input(
    case: Beside, promises_x: bool, tmp_path: Path
) -> None:
    """Behind a kernel that is late to write that: where a GEMM promises nothing, they read it too early."""
    given = operands(case.num_tokens, case.columns, case.rows, torch.bfloat16, rank=16, num_slots=8)
    given.slots[: case.num_tokens] = torch.arange(case.num_tokens) % 8
    given.scales.fill_(0.5)
    *adapters, rows = on_device(given)[2:]
    behind = gemm_kernel.AdaptersBehind(adapters[0], adapters[1], adapters[3])
    weight = torch.randn(sum(case.rows), case.columns, device=DEVICE).bfloat16() / case.columns**0.5

    def apart(x: torch.Tensor) -> torch.Tensor:
        return lora_kernel.launch(gemm_kernel.launch(x, weight, None, case.gemm), x, *adapters, rows)

    def beside(x: torch.Tensor) -> torch.Tensor:
        block = overlapped.block_bytes(16)
        blocks = overlapped.blocks_beside(case.num_tokens, block)
        config = case.gemm if case.gemm.clusters else overlapped.leave_room(case.gemm, blocks * block)
        y = gemm_kernel.launch(x, weight, None, config, promises_x=promises_x, behind=behind)
        return lora_kernel.launch(y, x, *adapters, rows, blocks_beside=blocks * 132)

    steps, are_right = captured(kernel_of_late_copies(tmp_path), case, beside), True
    for seed in range(10):
        steps.replay(seed)
        wanted = [apart(source) for source in steps.sources]
        assert all(map(torch.equal, steps.copies, steps.sources))
        are_right &= all(map(torch.equal, steps.results, wanted))
    if promises_x:
        assert are_right
    elif case is BESIDE[0]:  # of which every block has room at once, and begins too early
        assert not are_right


@on_hopper
@pytest.mark.parametrize("num_tokens", [1, 32, 33, 300])
@pytest.mark.parametrize("rank", [16, 64])
def test_the_op_of_both_has_the_bits_of_the_two(num_tokens: int, rank: int) -> None:
    call = registry.select("linear_lora", device=DEVICE, dtype=torch.bfloat16, provider="cuda").call
    for columns, rows in ((4096, (4096,)), (4096, (14336, 14336)), (576, (40, 8))):
        x, weight, bias, *adapters = on_device_with_weight(num_tokens, columns, rows, rank)
        y = torch.ops.lamina.linear.default(x, weight, bias)
        wanted = torch.ops.lamina.lora.default(y, x, *adapters)
        assert torch.equal(call(x, weight, bias, *adapters), wanted)


def on_device_with_weight(num_tokens: int, columns: int, rows: tuple[int, ...], rank: int) -> list[Any]:
    given = operands(num_tokens, columns, rows, torch.bfloat16, rank=rank, num_slots=8)
    _, x, *adapters = on_device(Operands(*given.each(x=given.x.contiguous())))
    weight = torch.randn(sum(rows), columns, device=DEVICE).bfloat16() / columns**0.5
    return [x, weight, weight[:, 0].contiguous(), *adapters]


@pytest.mark.parametrize("compile_", [False, True])
def test_adapters_are_served_as_merged_models_are(compile_: bool, tiny_folder: Path, tmp_path: Path) -> None:
    """Through CUDA graphs of either kind of step, in float32, where nothing is near enough to tie."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    settings = {"dtype": "float32", "compile": compile_, "num_kv_blocks": 64, "max_num_seqs": 8}
    folders = [write_adapter(tiny_folder, tmp_path / f"a{seed}", seed=seed) for seed in range(3)]
    merged = [write_merged(tiny_folder, one, tmp_path / f"m{n}") for n, one in enumerate(folders)]

    def answers(runtime: Runtime, **options: str) -> list[tuple[int, ...]]:
        return [one.outputs[0].token_ids for one in runtime.generate(PROMPTS, params, **options)]

    wanted = []
    for folder in [tiny_folder, *merged]:
        with Runtime.from_pretrained(folder, **settings) as runtime:
            wanted.append(answers(runtime))
    lora = LoRAConfig(max_loras=2, max_lora_rank=8)
    with Runtime.from_pretrained(tiny_folder, lora=lora, **settings) as runtime:
        for number, folder in enumerate(folders):
            runtime.load_adapter(f"a{number}", folder)
        for _ in range(2):
            assert answers(runtime) == wanted[0]
            for number in range(3):
                assert answers(runtime, adapter=f"a{number}") == wanted[number + 1]
