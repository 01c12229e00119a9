"""What tells a chat's answers from a completion's, whole or in chunks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...runtime.engine.logprobs import Logprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """One shape of answers: names, and how a choice holds its text and log-probabilities."""

    object: str  # the name of a whole answer
    chunk_object: str  # and of a chunk
    content: Callable[[str], dict[str, Any]]  # a choice's field for its whole text
    around_first: tuple[str, str]  # what of a choice stands before the text of its first chunk, and behind it
    around_next: tuple[str, str]  # and of those that follow
    without_text: str  # what stands there in the last, which has none
    logprobs: Callable[[Sequence[int], Sequence[Logprobs | None], int], tuple[dict[str, Any], int]]
    """Of some tokens, the first of which is at that character of the text; and the character after them."""
    prompt_ids_in_choice: bool  # whether the token ids of a prompt are a field of choices, else of the whole
