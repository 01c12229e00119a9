"""What is measured: Lamina and transformers, behind one small interface."""

import inspect
from pathlib import Path
from typing import Any, Protocol

import torch
from clock import Clock, Spent

from lamina import Runtime, SamplingParams

Prompts = list[list[int]]


class Contender(Protocol):
    """Something that writes greedy tokens for prompts of one length, and knows each before it goes on."""

    name: str

    def prefill(self, prompts: Prompts) -> Spent:
        """Until the first token of every prompt."""

    def decode(self, prompts: Prompts, num_tokens: int) -> Spent:
        """For num_tokens tokens a prompt after the first."""


class _Stepping(Runtime):
    """Tells the time after each step."""

    clock: Clock | None = None
    marks: list[Spent]

    def _step(self) -> None:
        super()._step()
        if self.clock is not None:
            self.marks.append(self.clock.spent())


class Lamina:
    """The runtime as a user gets it: scheduler, paged cache, sampling and outputs included."""

    def __init__(
        self, name: str, model: str, max_batch: int, max_prompt_tokens: int, **settings: Any
    ) -> None:
        self.name = name
        # one step must hold every prompt, so that decoding starts for all of them at once
        self.runtime = _Stepping.from_pretrained(
            model,
            max_num_seqs=max_batch,
            max_num_batched_tokens=max_prompt_tokens,
            prefix_cache=False,  # the same prompts come again and again, and are to be computed
            **settings,
        )

    def prefill(self, prompts: Prompts) -> Spent:
        return self._marks(prompts, 1)[0]

    def decode(self, prompts: Prompts, num_tokens: int) -> Spent:
        first, *_, last = self._marks(prompts, num_tokens + 1)
        return Spent(last.wall - first.wall, last.cpu - first.cpu)

    def _marks(self, prompts: Prompts, num_tokens: int) -> list[Spent]:
        """When each token was there."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        self.runtime.marks, self.runtime.clock = [], Clock()
        self.runtime.generate(prompts, params)
        assert len(self.runtime.marks) == num_tokens, "prompts were not computed in one step"
        return self.runtime.marks


class Transformers:
    """A bare greedy loop over transformers' own model with its static cache: no generate() overhead."""

    def __init__(self, name: str, folder: Path, dtype: str, *, compiled: bool) -> None:
        from transformers import AutoModelForCausalLM

        self.name = name
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        names = inspect.signature(self.model.forward).parameters
        self.cache_argument = "cache" if "cache" in names else "past_key_values"  # renamed within version 5
        # Prefill stays eager: compiled code for it would be one more whole-model compile a length.
        self.step = torch.compile(self.model.forward, dynamic=False) if compiled else self.model.forward

    def prefill(self, prompts: Prompts) -> Spent:
        clock = Clock()
        self._first_tokens(prompts, 0)[0].tolist()
        return clock.spent()

    @torch.inference_mode()
    def decode(self, prompts: Prompts, num_tokens: int) -> Spent:
        tokens, cache = self._first_tokens(prompts, num_tokens)
        length = len(prompts[0])
        clock = Clock()
        for position in range(length, length + num_tokens):
            positions = torch.full((1, 1), position)
            logits = self.step(tokens, position_ids=positions, **{self.cache_argument: cache}).logits
            tokens = logits[:, -1:].argmax(-1)
            tokens.tolist()  # a server has to know each token to stop and to stream
        return clock.spent()

    @torch.inference_mode()
    def _first_tokens(self, prompts: Prompts, num_tokens: int) -> tuple[torch.Tensor, object]:
        from transformers import StaticCache

        cache = StaticCache(config=self.model.config, max_cache_len=len(prompts[0]) + num_tokens + 1)
        ids = torch.tensor(prompts)
        logits = self.model(ids, logits_to_keep=1, **{self.cache_argument: cache}).logits
        return logits[:, -1:].argmax(-1), cache
