"""What Inductor writes for a card: fused kernels with 32-bit indices, though the number of tokens is open."""

import re

import pytest
import torch

from lamina.common.store import Store
from lamina.compiler.compile import Program, compile_program
from lamina.compiler.config import CompileConfig
from lamina.models.config import ModelConfig
from lamina.models.layers import FAST_OPS
from lamina.models.llama import LLAMA

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MAX_KERNELS = 5  # of a middle piece: two residual norms, SiLU times up, and the rotations of query and key
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


def test_a_middle_piece_is_five_kernels_with_32_bit_indices(tmp_path):
    config = ModelConfig(architecture="LlamaForCausalLM", **SIZES)
    table = {name: (spec.shape, torch.bfloat16) for name, spec in LLAMA.parameters(config).items()}
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
    store = Store(tmp_path)
    compiled = compile_program(program, CompileConfig(), "fast", store)
    source = store.get(compiled.plan.pieces[1].artifact.source).decode()
    signatures = re.findall(r"'signature': (\{[^}]*\})", source)
    assert 0 < source.count("async_compile.triton(") <= MAX_KERNELS
    assert len(signatures) == source.count("async_compile.triton(")
    for signature in signatures:
        assert "'xnumel': 'i32'" in signature
        assert "i64" not in signature.replace("*i64", "")
