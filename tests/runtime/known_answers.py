"""Prompts, greedy tokens and the likelihood of what is known, for tests that compare caches."""

import torch

from lamina import SamplingParams

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
