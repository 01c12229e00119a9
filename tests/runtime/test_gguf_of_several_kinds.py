"""A GGUF file of a K-quant mix as users load it: compiled, explained, verified and over ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lamina import Runtime, SamplingParams
from lamina.common.progress import say_nothing
from lamina.custom_ops.all_reduce.group import Group
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.verify import verify

from ..models.checkpoints.test_gguf import KIND, write_gguf
from ..models.checkpoints.test_gguf_blocks import relative_error
from ..ranks import as_threads

PROMPTS = [[5, 9, 301], [7] * 11 + [44, 3], list(range(10, 47))]
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
# Ranks of two have 8 rows of key and value each: no group of sixteen.
SIZES = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 64, "num_key_value_heads": 2}
MIX = {"blk.0.attn_v.weight": KIND.Q6_K, "blk.0.ffn_up.weight": KIND.Q8_0, "output.weight": KIND.Q6_K}
ROUNDING = 0.02  # of activations that are quantized, where the last bit of one decides
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 64}


@pytest.fixture
def write(make_tiny_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """write(kinds) -> a file of one layer, Q4_K where nothing else is said."""
    source = make_tiny_folder(**SIZES, head_dim=8, num_hidden_layers=1)
    return lambda kinds: write_gguf(tmp_path / f"{len(kinds)}.gguf", source, kind=KIND.Q4_K, kinds=kinds)


def answered(path: Path, **settings: Any) -> tuple[Tensor, str]:
    """The logits that the first tokens are sampled from, and what the runtime explains."""
    seen: list[Tensor] = []
    with Runtime.from_pretrained(path, **SETTINGS | settings) as runtime:
        runtime._loaded.runner.on_logits = lambda plan, logits: seen.append(logits.clone())
        runtime.generate([list(prompt) for prompt in PROMPTS], GREEDY)
        return seen[0], runtime.explain()


def sites(explained: str) -> list[str]:
    """What each pass found, in each piece."""
    return [line for line in explained.splitlines() if line.endswith(" sites")]


def test_compiled_it_answers_as_it_does_op_by_op_and_every_pass_finds_what_it_finds_elsewhere(
    write: Callable[..., Path], compile_cache: Path
) -> None:
    path = write(MIX)
    logits, _ = answered(path, compile=False)
    compiled_logits, explained = answered(path, cache_dir=compile_cache)
    assert relative_error(compiled_logits, logits) < ROUNDING
    assert "528 rows of Q4_K, 16 rows of Q6_K: Q4_K has four bits a weight" in explained
    assert "layers.0.gate_up [1024, 512] q4_k+q8_0: numbers uint8 [425984]" in explained
    _, of_one_kind = answered(write({}), cache_dir=compile_cache)
    assert "+" not in "".join(line for line in of_one_kind.splitlines() if line.startswith("quantization"))
    assert sites(explained) == sites(of_one_kind)


def test_what_it_computes_is_verified(write: Callable[..., Path], compile_cache: Path) -> None:
    """Piece by piece on samples, and against transformers on what the blocks stand for."""
    config = RuntimeConfig(model=str(write(MIX)), cache_dir=str(compile_cache), **SETTINGS)
    found = verify(config, [PROMPTS[2]], 1, say_nothing)
    assert found.is_right
    assert found.projections["layers.0.qkv"].scheme == "q4_k+q6_k"
    assert all(piece.is_right for piece in found.pieces)


def test_ranks_answer_as_one_process_does(write: Callable[..., Path]) -> None:
    path = write(MIX)
    logits, _ = answered(path, compile=False)

    def work(group: Group) -> tuple[Tensor, str]:
        return answered(path, compile=False, tensor_parallel=2)

    for own_logits, explained in as_threads(2, work):
        assert "264 rows of Q4_K, 8 rows of Q6_K" in explained
        assert relative_error(own_logits, logits) < ROUNDING
