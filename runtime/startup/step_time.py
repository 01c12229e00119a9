"""How many tokens of prompts a step on a CPU takes in, by an estimate of its time: about a second.

Nobody is answered, and nothing is interrupted, before a step ends. It is estimated rather than measured, so
that the same machine and model always cut prompts alike.
"""

import logging

import torch

from ...common.logging import get_logger, log_once
from ...models.config import ModelConfig
from ...models.registry import find_model
from . import memory
from .threads import choose_threads

logger = get_logger("runtime")

SECONDS = 1.0
# Operations a second of one thread, about half of what a core at 3 GHz could do in float32.
RATES = {"AVX2": 48e9, "AVX512": 64e9}
SLOWEST_RATE = 12e9
BFLOAT16_SPEEDUP = 2  # where the CPU multiplies it: twice as many to an instruction, at least
LONGEST_PROMPT = 8192  # that the estimate looks at; the steps of a longer one take longer in its later part
LEAST, MULTIPLE = 32, 16  # of fewer tokens the weights are read too often


def prefill_tokens(
    model: ModelConfig, dtype: torch.dtype, max_model_len: int, max_num_batched_tokens: int
) -> int | None:
    """Tokens of prompts in a step; None where max_num_batched_tokens take no longer than they should."""
    operations, isa = operations_of_token(model, max_model_len), torch.backends.cpu.get_cpu_capability()
    num_threads = choose_threads().count
    rate = num_threads * RATES.get(isa, SLOWEST_RATE)
    if dtype == torch.bfloat16 and memory.cpu_multiplies_bfloat16():
        rate *= BFLOAT16_SPEEDUP
    within = int(SECONDS * rate / operations) // MULTIPLE * MULTIPLE
    chosen = min(max(within, LEAST), max_num_batched_tokens)
    log_once(
        logger,
        logging.INFO,
        f"prefill on cpu: up to {chosen} tokens a step, by {operations / 1e9:.2g} GFLOP a token, "
        f"{num_threads} threads and {isa}; max_num_batched_tokens or prefill_chunk set another bound",
    )
    return chosen if chosen < max_num_batched_tokens else None


def operations_of_token(model: ModelConfig, max_model_len: int) -> int:
    """Additions and multiplications for a token in the middle of a long prompt, without the LM head."""
    seen = min(max_model_len, LONGEST_PROMPT) // 2
    reaches = [spec.reach for spec in find_model(model.architecture).attention(model)]
    positions = sum(seen if reach is None else min(reach, seen) for reach in reaches)
    gemms = 2 * model.num_layers * memory.weights_of_layer(model)
    return gemms + 4 * model.num_heads * model.head_dim * positions
