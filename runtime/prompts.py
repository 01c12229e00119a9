"""What callers hand to a runtime: one prompt or many as a list, each as token ids that can be served."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ..common.errors import PromptTooLongError, RequestError, shown
from .sampling_params import SamplingParams
from .validation import as_int

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None
Prepared = TypeVar("Prepared")


def as_list(prompts: Prompts) -> list[Prompt]:
    """Returns one prompt or many as a list; a list of integers is one prompt. RequestError for none."""
    if isinstance(prompts, str):
        return [prompts]
    if not checked_kind(prompts):
        raise RequestError("prompts is empty; wanted at least one prompt")
    if all(isinstance(item, (str, Sequence)) for item in prompts):
        return list(prompts)  # type: ignore[arg-type]
    return [prompts]  # type: ignore[list-item]


def each(prompts: Sequence[Prompt], prepare: Callable[[int, Prompt], Prepared]) -> Iterator[Prepared]:
    """Yields prepare(index, prompt) of every prompt; a RequestError about one of many says which."""
    for index, prompt in enumerate(prompts):
        try:
            prepared = prepare(index, prompt)
        except RequestError as error:
            if len(prompts) == 1:
                raise
            raise RequestError(f"prompts[{index}]: {error}") from error
        yield prepared


def checked_kind(prompts: Any) -> Any:
    """Returns what was given if it is text or a sequence; RequestError for anything else."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(f"prompts is {shown(prompts)}; wanted text, token ids, or a list of either")
    return prompts


def one_each(params: Params, count: int) -> Sequence[SamplingParams | None]:
    """Returns parameters for each of `count` prompts; RequestError for a list of another length."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, str) or not isinstance(params, Sequence) or len(params) != count:
        raise RequestError(
            f"params is {shown(params)}; wanted one SamplingParams, or a list of {count}, one for each prompt"
        )
    return params


def check_prompt(
    token_ids: Iterable[int],
    *,
    vocab_size: int,
    max_model_len: int,
    capacity_tokens: int,
    declared_len: int | None = None,
    num_new_tokens: int = 1,
) -> tuple[int, ...]:
    """Returns the prompt as plain ints; RequestError, saying what is wrong, where it cannot be served.

    declared_len: positions that the checkpoint declares, for the remedy. num_new_tokens: for which
    there is to be room beside it.
    """
    ids = _plain_ids(token_ids, max_model_len, declared_len, num_new_tokens)
    if not ids:
        raise RequestError("the prompt is empty (0 tokens); give at least one token, such as the model's BOS")
    for wrong in (min(ids), max(ids)):
        if not 0 <= wrong < vocab_size:
            raise RequestError(
                f"prompt token {shown(wrong)} at position {ids.index(wrong)} is outside the vocabulary; "
                f"ids must be 0 to {vocab_size - 1}: was the prompt encoded by another model's tokenizer?"
            )
    if len(ids) > capacity_tokens:
        raise PromptTooLongError(
            f"the prompt has {len(ids)} tokens, but the whole KV cache holds {capacity_tokens}; "
            "shorten the prompt, or raise num_kv_blocks or memory_fraction"
        )
    return ids


def _plain_ids(
    token_ids: Iterable[int], max_model_len: int, declared_len: int | None, num_new_tokens: int
) -> tuple[int, ...]:
    most = max_model_len - num_new_tokens
    if isinstance(token_ids, (str, bytes)):
        raise RequestError(f"the prompt is {type(token_ids).__name__}, wanted token ids; encode text first")
    try:
        ids = tuple(itertools.islice(token_ids, most + 1))  # no more, however many there are
    except TypeError as error:
        raise RequestError(f"the prompt is {shown(token_ids)}, wanted a sequence of token ids") from error
    if len(ids) > most:
        beside = " and one new token" if num_new_tokens else ""
        raise PromptTooLongError(
            f"the prompt has {_length_of(token_ids)} tokens, but max_model_len {max_model_len} leaves room "
            f"for at most {most}{beside}; shorten the prompt"
            f"{_longer(max_model_len, declared_len)}"
        )
    if set(map(type, ids)) <= {int}:
        return ids
    return tuple(_plain_id(id_, position) for position, id_ in enumerate(ids))


def _longer(max_model_len: int, declared_len: int | None) -> str:
    """What to do for more positions than max_model_len, for an error."""
    if declared_len is None or max_model_len < declared_len:
        return " or raise max_model_len"
    return f", as the checkpoint declares {declared_len} positions; only allow_long_context goes beyond"


def _length_of(token_ids: object) -> str:
    try:
        return str(len(token_ids))  # type: ignore[arg-type]  # the TypeError is the question asked
    except (TypeError, OverflowError):
        return "too many"


def _plain_id(value: object, position: int) -> int:
    plain = as_int(value)
    if plain is None:
        got = f"prompt token {shown(value)} at position {position}"
        raise RequestError(f"{got} is no integer; give token ids")
    return plain
