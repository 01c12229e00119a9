"""What a step leaves on the device for the host, and its way there."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .logprobs import LogprobsTensors


class StepResults(NamedTuple):
    """The tensors of a step that are read once it is over; the next step overwrites where they are."""

    sampled: Tensor  # [samples] int32
    verdict: Tensor | None = None  # [3, rows] int32, what became of drafts; None where nobody drafts
    left: Tensor | None = None  # of each row, as Speculator.left, where the next step or the host wants it
    logprobs: LogprobsTensors | None = None
    pooled: Tensor | None = None  # [n, size] float32, results of prompts that end; None where none does
    failure: Tensor | None = None  # [1] int32, not 0 where a stage before has failed

    def in_flight(self) -> tuple["StepResults", Any]:
        """Copies on the host, and the CUDA event that says when they are there; None: they are."""
        if self.sampled.device.type != "cuda":
            verdict = None if self.verdict is None else self.verdict.clone()
            return self._replace(sampled=self.sampled.clone(), verdict=verdict, failure=None), None
        copies = StepResults(
            sampled=copy_to_host(self.sampled),
            verdict=_copied(self.verdict),
            left=_copied(self.left),
            logprobs=self.logprobs and self.logprobs.each(copy_to_host),
            pooled=_copied(self.pooled),
            failure=_copied(self.failure),
        )
        arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return copies, arrived


def copy_to_host(values: Tensor) -> Tensor:
    """A copy in pinned memory, which is there when all that was launched is over."""
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)


def _copied(values: Tensor | None) -> Tensor | None:
    return None if values is None else copy_to_host(values)
