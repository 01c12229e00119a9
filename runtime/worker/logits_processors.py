"""A request's own logits processors: called, and judged by what they return; they end their request alone."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...common.errors import ProcessorError, shown
from ..protocol.interrupts import InterruptAtRequestError
from ..protocol.scheduler_output import TokenHistory
from ..sampling_params import LogitsProcessor

MOST_SHOWN = 200  # characters of what a processor raised or returned


def apply_processors(
    processors: Sequence[LogitsProcessor], history: TokenHistory, logits: Tensor
) -> ProcessorError | None:
    """Let a request's functions change its logits [vocab] float32, which can be chosen by, in place.

    Returns what is wrong with one of them, whatever it raised or returned; the logits are any numbers then.
    """
    for index, processor in enumerate(processors):
        cause: BaseException | None = None
        try:
            wrong = _wrong_result(
                processor(history.prompt_token_ids, history.output_token_ids, logits.clone()), logits
            )
        except BaseException as error:  # a caller's program: anything may come out of it, SystemExit too
            wrong, cause = f"raised {shown(error, MOST_SHOWN)}", error
        if wrong is not None:
            failure = ProcessorError(f"logits_processors[{index}] {wrong}", history.request_id)
            failure.__cause__ = cause
            if isinstance(cause, KeyboardInterrupt):
                raise InterruptAtRequestError(history.request_id, failure) from cause
            return failure
    return None


def _wrong_result(result: object, logits: Tensor) -> str | None:
    """Take over what a processor made of logits; what is wrong with it, in words, else None."""
    if not isinstance(result, Tensor):
        return f"returned {shown(result, MOST_SHOWN)}; wanted a tensor {list(logits.shape)}, the logits"
    if result.shape != logits.shape or result.layout is not torch.strided or result.is_complex():
        odd = result.is_complex() or result.layout is not torch.strided
        kind = f" of {result.dtype}, {result.layout}" if odd else ""
        return f"returned {list(result.shape)}{kind}; wanted a tensor {list(logits.shape)}, the logits"
    logits.copy_(result)
    if not bool((logits < math.inf).all()):  # nor is NaN
        return "returned NaN or infinity; wanted numbers, and -inf for what must not be chosen"
    if not bool((logits > -math.inf).any()):
        return "returned -inf for every token; wanted one that may be chosen"
    return None
