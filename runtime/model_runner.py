"""Runs one scheduled step on the device: the arena, the forward, the logits of the last rows, the sampler."""

from collections.abc import Callable

import torch
from torch import Tensor

from .attention import PagedAttention
from .input_batch import BatchView, InputBatch
from .sampler import SamplingRows, sample
from .scheduler import SchedulerOutput

Forward = Callable[[Tensor, Tensor, PagedAttention], Tensor]  # token_ids [T], positions [T] -> hidden [T, H]
Logits = Callable[[Tensor], Tensor]  # hidden [n, H] -> [n, vocab]


class StepHandle:
    """A step that was launched; its tokens are read when they are needed."""

    def __init__(self, sampled: Tensor | None) -> None:
        self._sampled = sampled

    def token_ids(self) -> list[int]:
        """The sampled ids in the plan's order, waiting for the device where it is still at work."""
        return [] if self._sampled is None else [int(token) for token in self._sampled.tolist()]


class ModelRunner:
    """Owns the KV tensors through `attention`; everything else of a step lives in the arena."""

    def __init__(
        self,
        *,
        forward: Forward,
        logits: Logits,
        attention: PagedAttention,
        arena: InputBatch,
        num_valid_ids: int,
    ) -> None:
        self._forward = forward
        self._logits = logits
        self._attention = attention
        self._arena = arena
        self._num_valid_ids = num_valid_ids

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> StepHandle:
        """Launch one step and return at once with the means to read its tokens."""
        batch = self._arena.write(plan)
        self._attention.begin(batch)
        hidden = self._forward(batch.token_ids, batch.positions, self._attention)
        if batch.num_samples == 0:
            return StepHandle(None)
        logits = self._logits(hidden.index_select(0, batch.logits_rows))
        return StepHandle(sample(logits, self._sampling_rows(batch)))

    def _sampling_rows(self, batch: BatchView) -> SamplingRows:
        return SamplingRows(
            temperature=batch.temperature,
            top_k=batch.top_k,
            top_p=batch.top_p,
            min_p=batch.min_p,
            seeds=batch.seeds,
            positions=batch.sample_positions,
            any_random=batch.any_random,
            any_filter=batch.any_filter,
            banned=batch.banned,
            num_valid_ids=self._num_valid_ids,
        )
