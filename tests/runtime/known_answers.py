"""Prompts, greedy tokens and the likelihood of what is known, for tests that compare caches."""

import torch

from lamina import Runtime, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def prompt(length, seed):
    return [(7 + 31 * seed + 13 * place * (seed + 1)) % 317 + 3 for place in range(length)]


PROMPTS = [prompt(5 + 6 * seed, seed) for seed in range(5)]


def tokens(runtime, prompts=PROMPTS, params=GREEDY):
    return [list(output.outputs[0].token_ids) for output in runtime.generate(prompts, params)]


def logprobs(runtime, prompts=PROMPTS):
    """Log-probabilities of each prompt's own tokens, after the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = runtime.generate(prompts, params)
    return torch.tensor(
        [
            token.logprob
            for output in outputs
            for token_id, place in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            for token in [place[token_id]]
        ]
    )


def assert_traffic_changes_no_token(folder, settings, *, keeps_all):
    """Requests get their own tokens together, in chunks, after hits and preemptions.

    keeps_all: of models whose caches are more than windows, so that room runs out.
    """
    settings = {**settings, "block_size": 4, "max_model_len": 128}
    with Runtime.from_pretrained(folder, **settings) as runtime:
        alone = [tokens(runtime, [one])[0] for one in PROMPTS]
        assert tokens(runtime) == alone
        assert runtime.stats()["prefix_cache"]["hit_tokens"] > 0
    small = {"num_kv_blocks": 16, "max_num_batched_tokens": 9, "prefill_chunk": 4}
    with Runtime.from_pretrained(folder, **settings, **small) as runtime:
        assert tokens(runtime) == alone
        assert runtime.stats()["preemptions"] > 0 or not keeps_all, "others hold windows alone"


def distance_of_kernels(folder, **settings):
    """How far likelihoods by the kernel of a CPU are from those by the formula, in the mean."""
    found = []
    for attention in ("cpu", "reference"):
        own = {"compile": False, "max_model_len": 128, "attention": attention}
        with Runtime.from_pretrained(folder, **own, **settings) as runtime:
            found.append(logprobs(runtime))
    return (found[0] - found[1]).abs().mean()


def assert_swapping_changes_no_token(folder, settings, block):
    """block: bytes of a block of 4 tokens, of which 60 may lie on the host."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [prompt(8 + number % 5, number) for number in range(16)]
    with Runtime.from_pretrained(folder, **settings) as runtime:
        alone = [tokens(runtime, [one], params)[0] for one in prompts]
    limits = {"block_size": 4, "num_kv_blocks": 4 * 9 + 1, "swap_bytes": 60 * block}
    with Runtime.from_pretrained(folder, **settings, **limits) as runtime:
        assert tokens(runtime, prompts, params) == alone
        swap = runtime.stats()["swap"]
        assert swap["total"] == 60
        assert swap["in"] > 0
        assert swap["in_bytes"] == swap["in"] * block
