"""Hidden states of prompts as results: pooled over the steps that a prompt takes, then given to a head."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...common.errors import LogitsError
from ..pooling_params import PoolingParams
from ..protocol.scheduler_output import SchedulerOutput, WantedPooling

Head = Callable[[Tensor], Tensor]  # pooled hidden states [n, H] -> [n, size of a result]
LEAST_NORM = 1e-12  # a shorter vector is divided by this, as torch's normalize does


class _Part(NamedTuple):
    """What a step adds to a request's vector."""

    start: int  # the position of its first token
    num_tokens: int
    sums: Tensor  # [H], of its hidden states, or the only one that counts


class Pooler:
    """Holds what prompts that take several steps have come to; a request's row in a step says from where on.

    A request that is computed again, be it after a fault or a preemption, begins at a position that it has
    passed: what was held from there on is dropped then. Sums are of float32 or wider.
    """

    def __init__(self, head: Head | None) -> None:
        """head: what is made of pooled hidden states, None for nothing."""
        self._head = head
        self._parts: dict[str, list[_Part]] = {}

    def forget(self, request_id: str) -> None:
        """Hold nothing of a request any more, if anything."""
        self._parts.pop(request_id, None)

    def take_in(self, plan: SchedulerOutput, wanted: WantedPooling, hidden: Tensor) -> Tensor | None:
        """Results [n, size] in float32 of the rows that end with this step, in their order; None for none.

        hidden: [step's tokens or more, H]; or of samples alone, where every prompt is pooled by its last.
        """
        is_of_samples = len(hidden) < plan.num_tokens
        counts = plan.num_sampled_tokens if is_of_samples else plan.num_scheduled_tokens
        ends = np.cumsum(counts)
        pooled: list[Tensor] = []
        for row, is_last, params in zip(
            wanted.rows.tolist(), wanted.are_last.tolist(), wanted.params, strict=True
        ):
            count, computed = int(counts[row]), int(plan.num_computed_tokens[row])
            states = hidden[int(ends[row]) - count : int(ends[row])]
            vector = self._add(plan.request_ids[row], params, computed, states, is_last=is_last)
            if vector is not None:
                pooled.append(vector)
        if not pooled:
            return None
        vectors = torch.stack(pooled).to(hidden.dtype)
        return (vectors if self._head is None else self._head(vectors)).to(torch.float32)

    def _add(
        self, request_id: str, params: PoolingParams, start: int, states: Tensor, *, is_last: bool
    ) -> Tensor | None:
        """The pooled states [H] of a prompt that ends with these [tokens, H]; None for one that goes on."""
        if params.pooling == "last":
            return states[-1] if is_last else None
        parts = [part for part in self._parts.pop(request_id, ()) if part.start < start]
        assert sum(part.num_tokens for part in parts) == start, (
            "hidden states of a prompt's beginning are missing"
        )
        if params.pooling == "cls":
            sums = parts[0].sums if parts else states[0].clone()
        else:
            sums = states.sum(0, dtype=torch.promote_types(states.dtype, torch.float32))
        parts.append(_Part(start, len(states), sums))
        if not is_last:
            self._parts[request_id] = parts
            return None
        if params.pooling == "cls":
            return sums
        return torch.stack([part.sums for part in parts]).sum(0) / (start + len(states))


def finished(
    plan: SchedulerOutput, wanted: WantedPooling, values: NDArray[np.float32]
) -> tuple[dict[str, bytes], dict[str, LogitsError]]:
    """Results [n, size] of the rows that end, as float32 in bytes, and errors of those that are no numbers.

    Both by request id.
    """
    ending = wanted.are_last.nonzero()[0].tolist()
    results: dict[str, bytes] = {}
    failures: dict[str, LogitsError] = {}
    for value, place in zip(values, ending, strict=True):
        request_id = plan.request_ids[int(wanted.rows[place])]
        if np.isfinite(value).all():
            results[request_id] = as_asked(value, wanted.params[place]).tobytes()
        else:
            failures[request_id] = LogitsError(
                "the pooled hidden states are not finite (NaN or infinity), so there is no result; "
                "`lamina verify` names the layer that they come from"
            )
    return results, failures


def as_asked(value: NDArray[np.float32], params: PoolingParams) -> NDArray[np.float32]:
    """A result cut, normalized and activated, in float32."""
    wide = value[: params.dimensions].astype(np.float64)
    if params.activation == "sigmoid":
        wide = np.exp(-np.logaddexp(0.0, -wide))
    elif params.activation == "softmax":
        wide = np.exp(wide - wide.max())
        wide /= wide.sum()
    if params.normalize:
        wide /= max(float(np.linalg.norm(wide)), LEAST_NORM)
    return wide.astype("<f4")
