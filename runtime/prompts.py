"""What callers hand to a runtime, one prompt or many, one set of parameters or one each: always as lists."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..common.errors import RequestError, shown
from .sampling_params import SamplingParams

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None
Prepared = TypeVar("Prepared")


def as_list(prompts: Prompts) -> list[Prompt]:
    """One prompt or many: a list of integers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not checked_kind(prompts):
        raise RequestError("prompts is empty; wanted at least one prompt")
    if all(isinstance(item, (str, Sequence)) for item in prompts):
        return list(prompts)  # type: ignore[arg-type]
    return [prompts]  # type: ignore[list-item]


def each(prompts: Sequence[Prompt], prepare: Callable[[int, Prompt], Prepared]) -> list[Prepared]:
    """prepare(index, prompt) of every prompt; what is wrong with one of many is said with its place."""
    prepared = []
    for index, prompt in enumerate(prompts):
        try:
            prepared.append(prepare(index, prompt))
        except RequestError as error:
            if len(prompts) == 1:
                raise
            raise RequestError(f"prompts[{index}]: {error}") from error
    return prepared


def checked_kind(prompts: Any) -> Any:
    """What was given, if it is of a kind that can be a prompt or many."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(f"prompts is {shown(prompts)}; wanted text, token ids, or a list of either")
    return prompts


def one_each(params: Params, count: int) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, str) or not isinstance(params, Sequence) or len(params) != count:
        raise RequestError(
            f"params is {shown(params)}; wanted one SamplingParams, or a list of {count}, one for each prompt"
        )
    return params
