"""What is generated for a GPU: a few calls of our ops, or fused kernels with 32-bit indices."""

import re
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lamina.common.store import Store
from lamina.compiler.compile import Program, compile_program
from lamina.compiler.config import CompileConfig
from lamina.custom_ops import rotary_and_write_kv_cache
from lamina.custom_ops.paged_attention.reference import dense_attention
from lamina.models.checkpoints.weights import dummy_weights
from lamina.models.config import ModelConfig
from lamina.models.families.llama import LLAMA
from lamina.models.layers import EXACT_OPS, FAST_OPS
from lamina.models.rope import rope_tables

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GPU = torch.device("cuda")
FORMULAS_ONLY = ("canonicalise", "residual_barrier", "add_rms_norm", "rms_norm", "silu_and_mul", "lower")
MAX_KERNELS = 5  # then of a middle piece: two residual norms, SiLU times up, the rotations of query and key
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=1024,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=3,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
)


def forward(weights, ids, positions, attend, ops=FAST_OPS):
    return LLAMA.forward(CONFIG, weights, ids, positions, attend, ops)


def compile_for_the_gpu(store, dtype=torch.bfloat16, passes=None, numerics="fast"):
    table = {name: (spec.shape, dtype) for name, spec in LLAMA.parameters(CONFIG).items()}
    table |= dict.fromkeys(("rope_cos", "rope_sin"), ((8192, 64), torch.float32))
    ops = EXACT_OPS if numerics == "exact" else FAST_OPS
    program = Program(forward=partial(forward, ops=ops), parameters=table, key={}, sources=(), device=GPU)
    return compile_program(program, CompileConfig(passes=passes), numerics, store)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def compiled(store):
    return compile_for_the_gpu(store)


@pytest.fixture(scope="module")
def weights():
    values = dummy_weights(LLAMA, CONFIG, dtype=torch.bfloat16, device=GPU, seed=0).by_name
    tables = rope_tables(CONFIG, max_model_len=8192, dtype=torch.bfloat16, device=GPU)
    return values | dict(zip(("rope_cos", "rope_sin"), tables, strict=True))


def attend(layer, q, k, v, out, cos=None, sin=None):
    """Attention over a sequence; with angles by way of a cache, as in serving."""
    if cos is not None:
        slots = torch.arange(q.shape[0], dtype=torch.int32, device=GPU)
        keys, values = (torch.zeros(1, *k.shape, dtype=k.dtype, device=GPU) for _ in range(2))
        q = rotary_and_write_kv_cache(q, k, v, cos, sin, keys, values, slots)
        k, v = keys[0], values[0]
    out.copy_(dense_attention(q, k, v, CONFIG.head_dim**-0.5))


def tokens(num_tokens):
    ids = torch.arange(num_tokens, dtype=torch.int32, device=GPU)
    return ids * 7 % CONFIG.vocab_size, ids


def middle_source(compiled, store):
    return store.get(compiled.plan.pieces[1].artifact.source).decode()


def test_a_middle_piece_is_four_calls_and_no_generated_kernel(compiled, store):
    source = middle_source(compiled, store)
    assert "async_compile.triton(" not in source
    assert re.findall(r"= torch\.ops\.lamina\.(\w+)\.default\(", source) == [
        *("linear", "add_rms_norm_linear"),  # of attention's output; gate and up with SiLU between them
        *("linear", "add_rms_norm_linear"),  # down; query, key and value
    ]
    attentions = [step for step in compiled.plan.steps if step.piece is None]
    assert all(len(step.inputs) == 6 for step in attentions), "attention does not get the angles"


def test_a_middle_piece_in_float32_keeps_the_gemms_of_torch(store):
    source = middle_source(compile_for_the_gpu(store, torch.float32), store)
    assert "torch.ops.lamina" not in source
    assert len(re.findall(r"extern_kernels\.(?:add)?mm\(", source)) == 4


def test_with_formulas_alone_a_middle_piece_is_five_kernels_with_32_bit_indices(store):
    source = middle_source(compile_for_the_gpu(store, passes=FORMULAS_ONLY), store)
    signatures = re.findall(r"'signature': (\{[^}]*\})", source)
    assert 0 < source.count("async_compile.triton(") <= MAX_KERNELS
    assert len(signatures) == source.count("async_compile.triton(")
    for signature in signatures:
        assert "'xnumel': 'i32'" in signature
        assert "i64" not in signature.replace("*i64", "")


@pytest.mark.parametrize("num_tokens", [1, 7, 16, 33, 200, 600])
@torch.no_grad()
def test_the_compiled_model_errs_no_more_than_twice_the_eager_one(
    compiled, weights, assert_close_to_reference, num_tokens
):
    wide = {name: weight.float() for name, weight in weights.items()}
    exact, naive = (forward(given, *tokens(num_tokens), attend) for given in (wide, weights))
    out = compiled.plan.bind(weights, GPU)(*tokens(num_tokens), attend)
    assert_close_to_reference(out, exact, naive)


@torch.no_grad()
def test_exact_is_eager_bit_for_bit_though_the_rotation_has_moved(store, weights):
    exact = compile_for_the_gpu(store, numerics="exact")
    assert exact.plan.reports[0]["num_matches"] == CONFIG.num_layers
    bound = exact.plan.bind(weights, GPU)
    for num_tokens in (1, 7, 33, 600):
        eager = forward(weights, *tokens(num_tokens), attend, EXACT_OPS)
        assert torch.equal(bound(*tokens(num_tokens), attend), eager), num_tokens


@torch.no_grad()
def test_a_token_has_the_same_bits_in_every_batch_of_one_choice_of_kernels(compiled, weights):
    """Rows do not mix: what stands in the other rows of a step is nothing to a row."""
    bound = compiled.plan.bind(weights, GPU)
    ids, positions = tokens(8)

    def one(row, value):
        return bound(torch.full_like(ids, value).index_fill_(0, row, 5), positions, itself)

    def itself(layer, q, k, v, out, cos=None, sin=None):
        out.copy_(q)

    row = torch.tensor([3], device=GPU)
    assert torch.equal(one(row, 9)[3], one(row, 800)[3])


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
@torch.no_grad()
def test_launches_of_a_middle_piece_for_one_token(compiled, weights):
    """Counted on the device, the ops' own and whatever a provider adds."""
    plan, counts = compiled.plan, []
    middle = plan.pieces[1].call

    def run_piece(call, arguments):
        if call is not middle:
            return call(arguments)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            results = call(arguments)
            torch.cuda.synchronize()
        counts.append(sum(event.count for event in profiled.key_averages() if event.self_device_time_total))
        return results

    run = partial(plan.bind(weights, GPU), *tokens(1), attend)
    run()  # kernels and workspaces are loaded
    run(run_piece)
    print("launches of a middle piece:", counts)
    assert max(counts) <= MAX_LAUNCHES


MAX_LAUNCHES = 9  # four GEMMs, two norms, a gate, and two that cuBLAS splits in two
