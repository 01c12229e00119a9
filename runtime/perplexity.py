"""Perplexity of a text: how likely a model as it is served finds each token after those before it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import LoadError
from ..common.progress import Progress, say_nothing
from .config import RuntimeConfig
from .runtime import Runtime
from .sampling_params import SamplingParams
from .tokenization.text_windows import WINDOW, read_text, text_windows


@dataclass(frozen=True, kw_only=True, slots=True)
class Perplexity:
    """Of so many tokens: exp of the mean of their negative log-probabilities."""

    value: float
    num_tokens: int


def perplexity_of_file(
    model: str | Path, text: str | Path, *, progress: Progress = say_nothing, **settings: Any
) -> Perplexity:
    """The perplexity of a file's text, in windows of 512 tokens, run op by op by a runtime of these settings.

    Raises LoadError for a file that is no text or has too little of it, and for a model without a tokenizer.
    """
    content = read_text(Path(text))
    with Runtime(RuntimeConfig(model=model, compile=False, **settings), progress) as runtime:
        if runtime.tokenizer is None:
            raise LoadError(f"{model} has no tokenizer, and {text} is text; wanted its tokenizer's files")
        windows = text_windows(runtime.tokenizer, content, window=min(WINDOW, runtime.max_prompt_tokens))
        logprobs = logprobs_of(runtime, windows, progress)
    return Perplexity(value=perplexity_of(logprobs), num_tokens=len(logprobs))


def logprobs_of(
    runtime: Runtime, windows: Sequence[Sequence[int]], progress: Progress = say_nothing
) -> list[float]:
    """The log-probability of each token of each window but its first, in nats."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    logprobs: list[float] = []
    for done, ids in enumerate(windows, start=1):
        (output,) = runtime.generate([list(ids)], params)
        reports = output.prompt_logprobs or ()
        logprobs += [report[token].logprob for report, token in zip(reports, ids, strict=True) if report]
        progress("perplexity", done / len(windows), "")
    return logprobs


def perplexity_of(logprobs: Sequence[float]) -> float:
    """exp of the mean negative log-probability; infinity where that is beyond all numbers."""
    try:
        return math.exp(-math.fsum(logprobs) / len(logprobs))
    except OverflowError:
        return math.inf
