"""lamina::lora and adapters of a runtime on a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lamina import CompileConfig, LoRAConfig, Runtime, SamplingParams
from lamina.compiler.passes import all_but
from lamina.custom_ops import add_rms_norm, linear, lora_add_rms_norm, lora_silu_and_mul, rms_norm
from lamina.custom_ops._shared import registry

from ..adapters import write_adapter, write_merged
from ..custom_ops.test_lora import Operands, check, operands

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
PROMPTS = [[1, 5, 9, 20], [7, 8, 200, 31, 4, 4, 19], [3] * 21]


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


GATES = [
    (1, 4096, 14336, 16),
    (32, 4096, 14336, 16),
    (7, 576, 1536, 8),
    (40, 8192, 3584, 16),
    (300, 1088, 300, 24),
]
NORMS = [
    (1, 14336, 4096, 16),
    (32, 4096, 4096, 16),
    (7, 1536, 576, 8),
    (40, 8192, 8192, 64),
    (300, 1088, 2048, 24),
]
BEYOND_THE_KERNELS = (5, 1090, 300, 12)
NARROW = [torch.bfloat16, torch.float16]


def in_turn(num_tokens: int, columns: int, rows: tuple[int, ...], rank: int, dtype: torch.dtype) -> Operands:
    """Fresh numbers of tokens of eight adapters in turn, beside those of none."""
    seed = int(torch.randint(1 << 30, ()))
    given = operands(num_tokens, columns, rows, dtype, rank=rank, num_slots=8, seed=seed)
    given.slots.copy_((torch.arange(len(given.slots)) + 4) % 9 - 1)
    return Operands(*given.each(x=given.x.contiguous()))


def over_poison(call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns, in memory that held NaN."""
    for shape in {tuple(one.shape) for one in arguments if isinstance(one, torch.Tensor)}:
        torch.full(shape, torch.nan, device=DEVICE, dtype=arguments[0].dtype)
    return call(*arguments)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("sizes", [*GATES, BEYOND_THE_KERNELS], ids=str)
def test_a_gate_behind_adapters_is_that_of_both_ops(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """But for its exponential, and a token has the bits that it has alone."""
    num_tokens, columns, half, rank = sizes
    given = in_turn(num_tokens, columns, (half, half), rank, dtype)
    arguments = on_device(given)
    plain = call_of("cuda", dtype)(*arguments)
    check(plain.cpu(), given)
    found = over_poison(lora_silu_and_mul, *arguments)
    gate, up = plain.float().chunk(2, dim=1)
    wanted = (gate / (1 + (-gate).exp())).to(dtype).float() * up
    torch.testing.assert_close(found.float(), wanted, rtol=2**-7, atol=1e-6)
    y, x, *rest, slots, rows = arguments
    one = slice(num_tokens - 1, num_tokens)
    alone = lora_silu_and_mul(y[one], x[one], *rest, slots[one].clone(), rows)
    assert torch.equal(alone[0], found[-1])


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("sizes", [*NORMS, BEYOND_THE_KERNELS], ids=str)
def test_a_norm_behind_adapters_is_that_of_both_ops(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """The sum bit for bit, its norm but for the order of the mean; a token has the bits that it has alone."""
    num_tokens, columns, width, rank = sizes
    given = in_turn(num_tokens, columns, (width,), rank, dtype)
    arguments = on_device(given)
    residual, weight = (
        torch.randn(*shape, device=DEVICE, dtype=dtype) for shape in ((num_tokens, width), (width,))
    )
    plain = call_of("cuda", dtype)(*arguments)
    check(plain.cpu(), given)
    normed, total = over_poison(lora_add_rms_norm, *arguments, residual, weight, 1e-5)
    wanted, sum_of = add_rms_norm(plain, residual, weight, 1e-5)
    assert torch.equal(total, sum_of)
    torch.testing.assert_close(normed, wanted, rtol=2**-7, atol=1e-6)
    assert (normed == wanted).float().mean() > 0.9
    y, x, *rest, slots, rows = arguments
    one = slice(num_tokens - 1, num_tokens)
    alone = lora_add_rms_norm(y[one], x[one], *rest, slots[one].clone(), rows, residual[one], weight, 1e-5)
    assert torch.equal(alone[0][0], normed[-1])


@pytest.mark.parametrize("num_tokens", [1, 12])
def test_a_layer_of_joined_ops_follows_the_kernels_ahead_in_a_graph(num_tokens: int) -> None:
    """Replayed with other contents and slots, behind GEMMs and norms that begin early themselves."""
    dtype, hidden, inner = torch.bfloat16, 4096, 14336  # whose GEMMs are ours, where they were measured
    shapes = [((inner, inner), hidden), ((hidden,), inner)]
    (*_, slots, _), *_ = both = [on_device(in_turn(num_tokens, k, rows, 16, dtype)) for rows, k in shapes]
    weights = [torch.randn(sum(rows), k, device=DEVICE, dtype=dtype) / k**0.5 for rows, k in shapes]
    norm = torch.rand(hidden, device=DEVICE, dtype=dtype)
    x, residual = (torch.randn(num_tokens, hidden, device=DEVICE, dtype=dtype) for _ in range(2))

    def chain() -> torch.Tensor:
        state, total = x, residual
        for _ in range(4):
            up = linear(state, weights[0])
            gated = lora_silu_and_mul(up, state, *both[0][2:5], slots, shapes[0][0])
            down = linear(gated, weights[1])
            state, total = lora_add_rms_norm(
                down, gated, *both[1][2:5], slots, shapes[1][0], total, norm, 1e-5
            )
        return state + total

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(20):
        x.normal_()
        residual.normal_()
        slots.copy_(torch.randint(-1, 8, slots.shape))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, chain())


def test_joined_steps_answer_as_those_apart(tiny_folder: Path, tmp_path: Path) -> None:
    """In bfloat16, through CUDA graphs: nearly the same log-probabilities."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    folder, found = write_adapter(tiny_folder, tmp_path / "a", seed=3), []
    for passes in (None, all_but("lora_silu_and_mul", "lora_add_rms_norm")):
        with Runtime.from_pretrained(
            tiny_folder,
            dtype="bfloat16",
            compile=CompileConfig(passes=passes),
            num_kv_blocks=64,
            max_num_seqs=8,
            lora=LoRAConfig(max_loras=2, max_lora_rank=8),
        ) as runtime:
            runtime.load_adapter("a", folder)
            answers = runtime.generate(PROMPTS, params, adapter="a")
        found.append([answer.outputs[0].logprobs[0] for answer in answers])
    for joined, apart in zip(*found, strict=True):
        shared = joined.keys() & apart.keys()
        assert len(shared) >= 3
        assert all(abs(joined[one].logprob - apart[one].logprob) < 0.05 for one in shared)


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
