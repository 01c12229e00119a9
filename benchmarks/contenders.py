"""What is measured: Lamina and transformers, behind one small interface."""

import inspect
import time
from pathlib import Path
from typing import Protocol

import torch

from lamina import Runtime, SamplingParams

Prompts = list[list[int]]


class Contender(Protocol):
    """Something that writes greedy tokens for prompts of one length."""

    name: str

    def prefill(self, prompts: Prompts) -> float:
        """Seconds until the first token of every prompt."""

    def decode(self, prompts: Prompts, num_tokens: int) -> float:
        """Tokens a second, all prompts together, for num_tokens tokens each after the first."""


class Lamina:
    """The runtime as a user gets it: scheduler, paged cache, sampling and outputs included."""

    name = "lamina"

    def __init__(self, model: str, dtype: str, max_batch: int, max_prompt_tokens: int) -> None:
        # one step must hold every prompt, so that decoding starts for all of them at once
        self.runtime = Runtime.from_pretrained(
            model,
            dtype=dtype,
            max_num_seqs=max_batch,
            max_num_batched_tokens=max_prompt_tokens,
            prefix_cache=False,  # the same prompts come again and again, and are to be computed
        )

    def prefill(self, prompts: Prompts) -> float:
        start = time.perf_counter()
        self.runtime.generate(prompts, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
        return time.perf_counter() - start

    def decode(self, prompts: Prompts, num_tokens: int) -> float:
        params = SamplingParams(max_tokens=num_tokens + 1, temperature=0, ignore_eos=True)
        outputs = self.runtime.generate(prompts, params)
        first = max(output.times.first_token for output in outputs)
        last = max(output.times.finished for output in outputs)
        return len(prompts) * num_tokens / (last - first)


class Transformers:
    """A bare greedy loop over transformers' own model with its static cache: no generate() overhead."""

    def __init__(self, folder: Path, dtype: str, *, compiled: bool) -> None:
        from transformers import AutoModelForCausalLM

        self.name = "transformers + torch.compile" if compiled else "transformers"
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        names = inspect.signature(self.model.forward).parameters
        self.cache_argument = "cache" if "cache" in names else "past_key_values"  # renamed within version 5
        # Prefill stays eager: compiled code for it would be one more whole-model compile a length.
        self.step = torch.compile(self.model.forward, dynamic=False) if compiled else self.model.forward

    def prefill(self, prompts: Prompts) -> float:
        start = time.perf_counter()
        self._first_tokens(prompts, 0)[0].tolist()
        return time.perf_counter() - start

    @torch.inference_mode()
    def decode(self, prompts: Prompts, num_tokens: int) -> float:
        tokens, cache = self._first_tokens(prompts, num_tokens)
        length = len(prompts[0])
        start = time.perf_counter()
        for position in range(length, length + num_tokens):
            positions = torch.full((1, 1), position)
            logits = self.step(tokens, position_ids=positions, **{self.cache_argument: cache}).logits
            tokens = logits[:, -1:].argmax(-1)
            tokens.tolist()  # a server has to know each token to stop and to stream
        return len(prompts) * num_tokens / (time.perf_counter() - start)

    @torch.inference_mode()
    def _first_tokens(self, prompts: Prompts, num_tokens: int) -> tuple[torch.Tensor, object]:
        from transformers import StaticCache

        cache = StaticCache(config=self.model.config, max_cache_len=len(prompts[0]) + num_tokens + 1)
        ids = torch.tensor(prompts)
        logits = self.model(ids, logits_to_keep=1, **{self.cache_argument: cache}).logits
        return logits[:, -1:].argmax(-1), cache
