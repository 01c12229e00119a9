"""On a CPU a step of prompts is bounded in time, by an estimate that what was asked for overrules."""

import dataclasses

import pytest
import torch

from lamina import Runtime, SamplingParams
from lamina.models.config import ModelConfig
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.startup import memory, step_time
from lamina.runtime.startup.step_time import operations_of_token, prefill_tokens
from lamina.runtime.startup.threads import Threads

from .resolving import resolve_alone

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
LLAMA_8B = dataclasses.replace(
    SMOLLM2,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)


@pytest.fixture
def machine(monkeypatch):
    """machine(threads, isa, units=False) makes this one so."""

    def make(threads, isa, units=False):
        monkeypatch.setattr(step_time, "choose_threads", lambda: Threads(count=threads, reason="a test"))
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: isa)
        monkeypatch.setattr(memory, "cpu_multiplies_bfloat16", lambda: units)
        monkeypatch.setattr(memory, "available_bytes", lambda device: 1 << 40)

    return make


def test_operations_are_those_of_projections_and_of_half_the_longest_context():
    projections = 2 * 30 * 576 * (2 * 576 + 2 * 192 + 3 * 1536)
    assert operations_of_token(SMOLLM2, 8192) == projections + 30 * 4 * 576 * 4096
    assert operations_of_token(SMOLLM2, 2) == projections + 30 * 4 * 576
    windowed = dataclasses.replace(SMOLLM2, sliding_window=64, layer_types=("sliding_attention",) * 30)
    assert operations_of_token(dataclasses.replace(windowed, architecture="MistralForCausalLM"), 8192) == (
        projections + 30 * 4 * 576 * 64
    )


def test_more_threads_and_wider_instructions_take_more_and_a_larger_model_takes_less(machine):
    def tokens(model, *cpu, dtype=torch.float32):
        machine(*cpu)
        return prefill_tokens(model, dtype, 8192, 2048)

    assert tokens(SMOLLM2, 2, "AVX512") == 256
    assert tokens(SMOLLM2, 2, "AVX512", True, dtype=torch.bfloat16) == 512
    assert tokens(SMOLLM2, 2, "AVX512", True) == tokens(SMOLLM2, 2, "AVX512", dtype=torch.bfloat16) == 256
    assert 32 <= tokens(SMOLLM2, 1, "DEFAULT") < tokens(SMOLLM2, 2, "AVX2") < 256
    assert tokens(SMOLLM2, 64, "AVX512") is None, "a second holds more than a step"
    assert tokens(LLAMA_8B, 2, "AVX512") == 32
    assert 32 < tokens(LLAMA_8B, 64, "AVX512") < 256


def test_what_was_asked_for_holds_and_what_was_chosen_is_said(machine, said):
    def bound(device="cpu", **settings):
        config = RuntimeConfig(model="m", max_num_seqs=4, num_kv_blocks=9, **settings)
        return resolve_alone(config, SMOLLM2, torch.float32, torch.device(device))

    machine(3, "AVX512")  # said once a process: no other test has three
    assert bound().max_prefill_tokens == 384
    assert any(
        "prefill on cpu: up to 384 tokens a step, by 0.5 GFLOP a token, 3 threads" in line for line in said()
    )
    assert bound().max_num_batched_tokens == 2048, "many answers at once are no prompts"
    assert bound(max_num_batched_tokens=1024).max_prefill_tokens is None
    assert bound(prefill_chunk=1024).max_prefill_tokens is None


def test_a_bound_cuts_prompts_and_changes_no_token(tiny_folder, monkeypatch):
    prompts, answers = [[number + 1] * 90 for number in range(3)], []
    for seconds in (1.0, 1e-9):
        monkeypatch.setattr(step_time, "SECONDS", seconds)
        with Runtime.from_pretrained(tiny_folder, compile=False, max_num_seqs=4) as runtime:
            outputs = runtime.generate(prompts, SamplingParams(max_tokens=8, temperature=0))
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


def test_prompts_share_their_own_part_of_a_step_and_answers_go_on_beside_it(make_server):
    server = make_server(blocks=90, budget=64, prefill=8)
    for number in range(3):
        server.add(str(number), 60, number, max_tokens=9)
    plans = server.drain()
    assert plans[0].num_tokens == 8
    assert max(plan.num_tokens for plan in plans) <= 8 + 3
    beside = [
        plan.num_scheduled_tokens.tolist() for plan in plans if plan.num_rows > 1 and plan.num_tokens > 8
    ]
    assert any(1 in counts and max(counts) >= 8 for counts in beside), "an answer and a whole part"
