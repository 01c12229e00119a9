"""What is measured: Lamina and transformers, behind one small interface."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import torch
from clock import Clock, Spent
from torch import Tensor

from lamina import Runtime, SamplingParams

Prompts = list[list[int]]


class Contender(Protocol):
    """Something that writes greedy tokens for prompts of one length, and knows each before it goes on."""

    name: str

    def prefill(self, prompts: Prompts) -> Spent:
        """Until the first token of every prompt."""

    def decode(self, prompts: Prompts, num_tokens: int) -> Spent:
        """For num_tokens tokens a prompt after the first."""


class Lamina:
    """The runtime as a user gets it: scheduler, paged cache, sampling and outputs included."""

    def __init__(
        self, name: str, model: str, max_batch: int, max_prompt_tokens: int, **settings: Any
    ) -> None:
        self.name = name
        # one step must hold every prompt, so that decoding starts for all of them at once
        self.runtime = Runtime.from_pretrained(
            model,
            max_num_seqs=max_batch,
            max_num_batched_tokens=max_prompt_tokens,
            prefix_cache=False,  # the same prompts come again and again, and are to be computed
            **settings,
        )

    def prefill(self, prompts: Prompts) -> Spent:
        return self._marks(prompts, 1)[0]

    def decode(self, prompts: Prompts, num_tokens: int) -> Spent:
        return Clock.between(self._marks(prompts, num_tokens + 1))

    def _marks(self, prompts: Prompts, num_tokens: int) -> list[Spent]:
        """When each token was there."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        client, clock, marks = self.runtime._client, Clock(), []
        step = client.step

        def step_and_mark() -> None:
            step()
            marks.append(clock.spent())

        with patch.object(client, "step", step_and_mark):
            self.runtime.generate(prompts, params)
        assert len(marks) == num_tokens, "prompts were not computed in one step"
        return marks


class Transformers:
    """A bare greedy loop over transformers' own model with its static cache: no generate() overhead.

    There is one cache for each number of prompts and tokens, made once and emptied between measurements: code
    compiled for it would be compiled anew for another, even of the same size.
    """

    def __init__(self, name: str, folder: Path, dtype: str, max_tokens: int, *, compiled: bool) -> None:
        from transformers import AutoModelForCausalLM

        self.name = name
        self.max_tokens = max_tokens  # decoded after a prompt
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        names = inspect.signature(self.model.forward).parameters
        self.cache_argument = "cache" if "cache" in names else "past_key_values"  # renamed within version 5
        # one whole-model compile a shape; prompts that are only there to be continued are computed eagerly
        self.forward = torch.compile(self.model.forward, dynamic=False) if compiled else self.model.forward
        self.caches: dict[tuple[int, int], Any] = {}

    @torch.inference_mode()
    def prefill(self, prompts: Prompts) -> Spent:
        cache, ids = self._empty_cache(prompts), torch.tensor(prompts)
        clock = Clock()
        self._next(self.forward, ids, cache).tolist()
        return clock.spent()

    @torch.inference_mode()
    def decode(self, prompts: Prompts, num_tokens: int) -> Spent:
        cache, length = self._empty_cache(prompts), len(prompts[0])
        tokens = self._next(self.model.forward, torch.tensor(prompts), cache)
        clock = Clock()
        marks = [clock.spent()]
        for position in range(length, length + num_tokens):
            positions = torch.full((1, 1), position)
            tokens = self._next(self.forward, tokens, cache, position_ids=positions)
            tokens.tolist()  # a server has to know each token to stop and to stream
            marks.append(clock.spent())
        return clock.between(marks)

    def _next(self, forward: Callable[..., Any], ids: Tensor, cache: Any, **arguments: Any) -> Tensor:
        """The likeliest token after each row [n, T] of ids: [n, 1]."""
        logits = forward(ids, logits_to_keep=1, **{self.cache_argument: cache}, **arguments).logits
        tokens: Tensor = logits.argmax(-1)
        return tokens

    def _empty_cache(self, prompts: Prompts) -> Any:
        from transformers import StaticCache

        shape = len(prompts), len(prompts[0]) + self.max_tokens
        if shape not in self.caches:
            self.caches[shape] = cache = StaticCache(config=self.model.config, max_cache_len=shape[1])
            self._next(self.model.forward, torch.tensor(prompts), cache)  # allocates it
        self.caches[shape].reset()
        return self.caches[shape]
