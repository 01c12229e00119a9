"""batch_invariant on a GPU: rows of GEMMs and attention, and logits, have the bits that they have alone."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lamina.common.progress import say_nothing
from lamina.compiler.config import CompileConfig
from lamina.custom_ops._shared import registry
from lamina.custom_ops.linear import _cuda as plain
from lamina.custom_ops.linear.choices import (
    BUCKETS,
    candidates,
    one_order,
    processors_of,
    sites_of,
)
from lamina.custom_ops.linear_silu_and_mul import _cuda as with_gate
from lamina.custom_ops.paged_attention import _fixed_splits
from lamina.runtime.batch_invariance import check_batch_invariance
from lamina.runtime.config import RuntimeConfig

from .paged_cases import DEVICE, PagedCase, make_case

pytestmark = pytest.mark.gpu
OPS = torch.ops.lamina
HALVES = (torch.bfloat16, torch.float16)
# rows and columns of weights: of 8B and Qwen3, one of each split-K, and of no whole tiles
SHAPES = ((4096, 4096), (6144, 4096), (4096, 14336), (2048, 1024), (131, 1032), (264, 72))
ROWS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 192, 193, 200, 256, 257, 300, 700, 2049)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def same_bits(left: Tensor, right: Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return torch.equal(left.contiguous().view(kind), right.contiguous().view(kind))


def operands(n: int, k: int, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(n + k)
    shapes = ((num_rows, k), (n, k), (n,))
    x, weight, bias = (torch.randn(shape, generator=generator, device=DEVICE) for shape in shapes)
    return x.to(dtype), (weight / k**0.5).to(dtype), bias.to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_a_gemm_have_the_bits_they_have_alone(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, bias = operands(*shape, max(ROWS), dtype)
    whole = OPS.linear.default(x, weight, bias, True)
    right = x.double() @ weight.double().T + bias.double()
    assert (whole.double() - right).abs().max() < 0.1 * right.abs().max()
    wrong = [
        (count, first)
        for count in ROWS
        for first in {0, (max(ROWS) - count) // 2}
        if not same_bits(
            OPS.linear.default(x[first : first + count], weight, bias, True), whole[first : first + count]
        )
    ]
    assert not wrong, "numbers of rows, and where they begin"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(28672, 4096), (6144, 1024), (2 * 136, 72)], ids=str)
def test_rows_of_a_fused_gemm_have_the_bits_they_have_alone(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, weight, _ = operands(*shape, max(ROWS), dtype)
    residual, norm = x.flip(0), torch.rand(shape[1], device=DEVICE).to(dtype)

    def run(rows: slice) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = OPS.add_rms_norm_linear.default(
            x[rows], residual[rows], norm, 1e-5, weight, None, True, None, True
        )
        return found

    whole = run(slice(None))
    for count in ROWS:
        rows = slice((max(ROWS) - count) // 2, (max(ROWS) - count) // 2 + count)
        for all_rows, some in zip(whole, run(rows), strict=True):
            assert same_bits(all_rows[rows], some), count


@pytest.mark.parametrize("kind", ["linear", "gated"])
@pytest.mark.parametrize("shape", [(4096, 4096), (6144, 4096), (2048, 2048)], ids=str)
def test_every_configuration_worth_measuring_sums_in_the_one_order(shape: tuple[int, int], kind: str) -> None:
    """So that it does not matter which of them was the fastest on a GPU."""
    x, weight, _ = operands(*shape, BUCKETS[-1], torch.bfloat16)
    launch = plain.launch if kind == "linear" else with_gate.launch
    split_k = one_order(*shape, processors_of(DEVICE))
    right, wrong = None, []
    for site in sites_of(kind, *shape, split_k=split_k):
        for config in candidates(site, processors_of(DEVICE)):
            out = launch(x[: site.num_tokens], weight, None, config, True)
            right = out if right is None else right
            rows = min(len(right), len(out))
            if not same_bits(out[:rows], right[:rows]):
                wrong.append(config)
            right = out if len(out) > len(right) else right
    assert not wrong


@pytest.fixture(params=[False, True], ids=["one split", "fixed splits"])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether Hopper's attention is by fixed splits."""
    monkeypatch.setattr(_fixed_splits, "ENABLED", request.param)
    return bool(request.param)


def rows_of(case: PagedCase, parts: Sequence[tuple[int, int, int]], flag: bool = True) -> tuple[Tensor, ...]:
    """Attention of rows first to before last of sequences of a case of whole prompts, in one call."""
    starts = case.query_start_loc.tolist()
    query = torch.cat([case.query[starts[seq] + first : starts[seq] + last] for seq, first, last in parts])
    counts = [last - first for _, first, last in parts]
    call = case._replace(
        out=torch.full_like(query, torch.nan),
        query=query.contiguous(),
        block_tables=case.block_tables[[seq for seq, _, _ in parts]],
        seq_lens=torch.tensor([last for *_, last in parts], dtype=torch.int32, device=DEVICE),
        query_start_loc=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE),
        max_query_len=max(counts),
    )
    OPS.paged_attention.default(*call, flag)
    return call.out.split(counts)


@pytest.mark.parametrize(
    "limits", [{}, {"window": 100}, {"window": 300, "soft_cap": 20.0}, {"chunk": 192}], ids=str
)
@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 128, "num_heads": 32, "num_kv_heads": 8, "block_size": 64},
        {"head_dim": 64, "num_heads": 16, "num_kv_heads": 2, "block_size": 64},
        {"head_dim": 128, "num_heads": 8, "num_kv_heads": 2, "block_size": 16},
        {"head_dim": 256, "num_heads": 4, "num_kv_heads": 1, "block_size": 64},
        {"head_dim": 128, "num_heads": 8, "num_kv_heads": 2, "block_size": 64, "dtype": torch.float16},
        {"head_dim": 64, "num_heads": 4, "num_kv_heads": 2, "block_size": 16, "dtype": torch.float32},
        {
            "head_dim": 128,
            "num_heads": 8,
            "num_kv_heads": 2,
            "block_size": 64,
            "cache_dtype": torch.float8_e4m3fn,
        },
    ],
    ids=str,
)
def test_rows_of_attention_have_the_bits_they_have_alone(
    sizes: dict[str, int], limits: dict[str, float], splits: bool
) -> None:
    lens = [1400, 1, 77, 500, 1025]
    case = make_case(lens, lens, **sizes, **limits)  # type: ignore[arg-type]
    whole = rows_of(case, [(seq, 0, length) for seq, length in enumerate(lens)])
    assert all(bool(rows.isfinite().all()) for rows in whole)
    wrong = []
    for count in (1, 2, 4, 8, 17, 64, 128, 129, 400):
        for last in (1400, 1025, 800, 513, 400):
            first = last - count
            alone = rows_of(case, [(0, first, last)])[0]
            beside = rows_of(case, [(3, 480, 500), (0, first, last), (2, 0, 77), (4, 1024, 1025)])[1]
            if not (same_bits(alone, whole[0][first:last]) and same_bits(beside, whole[0][first:last])):
                wrong.append((count, last))
    decode = rows_of(case, [(seq, length - 1, length) for seq, length in enumerate(lens)])
    wrong += [(seq,) for seq, rows in enumerate(decode) if not same_bits(rows, whole[seq][-1:])]
    assert not wrong, "rows and where they end, or sequences in decode"


def folder_of(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def config_of(folder: Path, **changes: object) -> RuntimeConfig:
    return RuntimeConfig(
        model=folder,
        load_format="dummy",
        device="cuda",
        max_num_seqs=64,
        num_kv_blocks=512,
        compile=CompileConfig(batch_invariant=True, verify=False),
        **changes,  # type: ignore[arg-type]
    )


MODELS = {
    "llama": {},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 256},
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_model_are_the_same_in_any_mix(name: str, tmp_path: Path, splits: bool) -> None:
    """Captured as CUDA graphs and not, in chunks, with prefixes found, and preempted."""
    found = check_batch_invariance(config_of(folder_of(tmp_path, **MODELS[name])), [], 45, say_nothing)
    assert found.is_right, found
    assert found.num_logits > 500
    assert found.num_preemptions
    assert found.num_cached_tokens


def test_without_the_mode_they_are_not(tmp_path: Path) -> None:
    config = config_of(folder_of(tmp_path))
    found = check_batch_invariance(replace(config, compile=CompileConfig(verify=False)), [], 9, say_nothing)
    assert not found.is_right
    assert found.first is not None


def test_triton_has_no_such_kernels() -> None:
    from lamina.common.errors import UnsupportedError

    linear = registry.select("linear", device=DEVICE, dtype=torch.bfloat16, provider="triton").call
    x, weight, bias = operands(64, 64, 2, torch.bfloat16)
    with pytest.raises(UnsupportedError, match="batch_invariant"):
        linear(x, weight, bias, True)
