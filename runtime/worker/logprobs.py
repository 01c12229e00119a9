"""Log-probabilities on the device, as a step wants them: of its samples and of tokens of prompts."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...custom_ops import top_logprobs
from ..protocol.scheduler_output import StepLogprobs, TokenLogprobs

ROWS_AT_ONCE = 128  # of a prompt: logits of all its tokens would take more memory than the rest of a step


class LogprobRows(NamedTuple):
    """Of which rows a step wants log-probabilities, on the device."""

    num_top: int
    samples: Tensor  # [a] int64, which of the samples
    before: Tensor  # [b] int64, which of the step's tokens
    targets: Tensor  # [b] int32, the tokens of prompts that come after these


class LogprobsTensors(NamedTuple):
    """Log-probabilities of a step, as lamina::top_logprobs gives them: ids, log-probabilities and ranks."""

    samples: tuple[Tensor, ...] = ()
    prompts: tuple[Tensor, ...] = ()

    def each(self, change: Callable[[Tensor], Tensor]) -> "LogprobsTensors":
        """The same with every tensor changed."""
        return LogprobsTensors(*(tuple(map(change, table)) for table in self))

    def read(self) -> StepLogprobs:
        """The same as plain data."""
        return StepLogprobs(samples=_rows(*self.samples), prompts=_rows(*self.prompts))


def sample_logprobs(
    rows: LogprobRows, logits: Tensor, sampled: Tensor, num_valid_ids: int
) -> tuple[Tensor, ...]:
    """Ids [a, 1 + num_top], log-probabilities likewise, ranks [a] of samples; () where none are wanted.

    From the model's own logits [samples, vocab] and what was sampled from them, int32 [samples].
    """
    if not len(rows.samples):
        return ()
    logits, own = logits.index_select(0, rows.samples), sampled.index_select(0, rows.samples)
    return top_logprobs(logits, own, num_valid_ids, rows.num_top)


def prompt_logprobs(
    rows: LogprobRows, hidden: Tensor, to_logits: Callable[[Tensor], Tensor], num_valid_ids: int
) -> tuple[Tensor, ...]:
    """Likewise of prompts [b], from hidden [T, H]; logits are made for this, of some tokens at a time."""
    tables = []
    for start in range(0, len(rows.before), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        logits = to_logits(hidden.index_select(0, rows.before[part]))
        tables.append(top_logprobs(logits, rows.targets[part], num_valid_ids, rows.num_top))
    return tuple(map(torch.cat, zip(*tables, strict=True)))


def _rows(*table: Tensor) -> tuple[TokenLogprobs, ...]:
    if not table:
        return ()
    ids, logprobs, ranks = (column.tolist() for column in table)
    return tuple(map(TokenLogprobs, map(tuple, ids), map(tuple, logprobs), ranks))
