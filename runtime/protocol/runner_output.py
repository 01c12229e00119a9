"""What one step came to, as plain data that another process could send."""

from collections.abc import Mapping

import numpy as np

from ...common.errors import LaminaError
from .plain_data import PlainData
from .scheduler_output import Ints, StepLogprobs, TokenIds


class RunnerOutput(PlainData, frozen=True, kw_only=True):
    """The tokens that a step sampled, and what is known besides of its rows.

    Where `error` is set the whole step failed: nothing else means anything, and it counts as never begun.
    """

    token_ids: TokenIds  # [n] sampled ids, row after row in the plan's order
    num_sampled: Ints | None = None  # [num_rows] ids each row yielded; None: as many as the plan says
    num_drafted: Ints | None = None  # [num_rows] drafts of each row that were no fillers; None: no drafts
    num_proposed: Ints | None = None  # [num_rows] drafts that the step left for the next; None: no drafter
    # [num_rows * k] which these are, -1 in place of none; None where the device keeps them to itself
    draft_ids: TokenIds | None = None
    logprobs: StepLogprobs | None = None  # as the plan wants them
    # By request id the tokens that come after its sample for certain, as its grammar leaves no other.
    forced: Mapping[str, tuple[int, ...]] = {}
    # By request id the results of prompts that end with the step, as float32, the lowest byte first.
    pooled: Mapping[str, bytes] = {}
    failures: Mapping[str, LaminaError] = {}  # by request id: failed alone
    error: Exception | None = None


def failed_step(error: Exception) -> RunnerOutput:
    """The output of a step that failed as a whole."""
    return RunnerOutput(token_ids=np.zeros(0, np.int32), error=error)
