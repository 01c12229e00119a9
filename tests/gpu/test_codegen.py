"""What is generated for a card: a few calls of our ops, or fused kernels with 32-bit indices."""

import re

import pytest
import torch

from lamina.common.store import Store
from lamina.compiler.compile import Compiled, Program, compile_program
from lamina.compiler.config import CompileConfig
from lamina.models.config import ModelConfig
from lamina.models.layers import FAST_OPS
from lamina.models.llama import LLAMA

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

FORMULAS_ONLY = ("canonicalise", "residual_barrier", "add_rms_norm", "rms_norm", "silu_and_mul", "lower")
MAX_KERNELS = 5  # then of a middle piece: two residual norms, SiLU times up, the rotations of query and key
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_layers": 3,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
}


def compile_for_the_card(
    store: Store, dtype: torch.dtype = torch.bfloat16, passes: tuple[str, ...] | None = None
) -> Compiled:
    config = ModelConfig(architecture="LlamaForCausalLM", **SIZES)
    table = {name: (spec.shape, dtype) for name, spec in LLAMA.parameters(config).items()}
    table |= dict.fromkeys(("rope_cos", "rope_sin"), ((8192, 64), torch.float32))
    program = Program(
        forward=lambda weights, ids, positions, attend: LLAMA.forward(
            config, weights, ids, positions, attend, FAST_OPS
        ),
        parameters=table,
        key={},
        sources=(),
        device=torch.device("cuda"),
    )
    return compile_program(program, CompileConfig(passes=passes), "fast", store)


def middle_source(compiled: Compiled, store: Store) -> str:
    return store.get(compiled.plan.pieces[1].artifact.source).decode()


def test_a_middle_piece_is_four_calls_and_no_generated_kernel(tmp_path):
    store = Store(tmp_path)
    compiled = compile_for_the_card(store)
    source = middle_source(compiled, store)
    assert "async_compile.triton(" not in source
    assert re.findall(r"= torch\.ops\.lamina\.(\w+)\.default\(", source) == [
        *("linear", "add_rms_norm_linear"),  # of attention's output; gate and up with SiLU between them
        *("linear", "add_rms_norm_linear"),  # down; query, key and value
    ]
    attentions = [step for step in compiled.plan.steps if step.piece is None]
    assert all(len(step.inputs) == 6 for step in attentions), "attention does not get the angles"


def test_a_middle_piece_in_float32_keeps_the_products_of_torch(tmp_path):
    store = Store(tmp_path)
    source = middle_source(compile_for_the_card(store, torch.float32), store)
    assert "torch.ops.lamina" not in source
    assert len(re.findall(r"extern_kernels\.(add)?mm\(", source)) == 4


def test_with_formulas_alone_a_middle_piece_is_five_kernels_with_32_bit_indices(tmp_path):
    store = Store(tmp_path)
    source = middle_source(compile_for_the_card(store, passes=FORMULAS_ONLY), store)
    signatures = re.findall(r"'signature': (\{[^}]*\})", source)
    assert 0 < source.count("async_compile.triton(") <= MAX_KERNELS
    assert len(signatures) == source.count("async_compile.triton(")
    for signature in signatures:
        assert "'xnumel': 'i32'" in signature
        assert "i64" not in signature.replace("*i64", "")
