"""Tokenizers with added tokens: special or not, of the vocabulary or behind it, with ids that nothing has."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from tokenizers import Tokenizer

STRUCTURE = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    *("<|tool_call|>", "<|/tool_call|>", "<|python_tag|>", "<|eom_id|>", "<｜tool▁call｜>"),
)
TEXT = ("<td>", "</h1>", "<=>", "[a]", "\n\n", "  ", "two words", "a▁b")


class Added(NamedTuple):
    """An added token, and how many ids before it nothing has."""

    content: str
    special: bool
    gap: int


def added_tokens(*always: str) -> st.SearchStrategy[list[Added]]:
    """Added tokens, those named among them."""
    structure = st.builds(Added, st.sampled_from(STRUCTURE), st.booleans(), st.integers(0, 3))
    text = st.builds(Added, st.sampled_from(TEXT), st.just(False), st.integers(0, 3))
    specials = {name: st.just(False) if name in TEXT else st.booleans() for name in always}
    named = st.tuples(
        *(st.builds(Added, st.just(name), specials[name], st.integers(0, 3)) for name in always)
    )
    others = st.lists(structure | text, max_size=6, unique_by=lambda one: one.content)
    both = st.tuples(named, others.map(lambda found: [one for one in found if one.content not in always]))
    return both.flatmap(lambda pair: st.permutations([*pair[0], *pair[1]]))


def with_added(base: Any, added: Sequence[Added]) -> Tokenizer:
    """A tokenizer of these tokens besides a base's, in this order, where no gap is behind its vocabulary."""
    tokenizer = json.loads(base.backend_tokenizer.to_str())
    vocabulary = tokenizer["model"]["vocab"]
    has_gaps = any(one.gap for one in added)
    next_id = max(vocabulary.values()) + 1
    for one in added:
        next_id += one.gap
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        entry = {"id": next_id, "content": one.content, "special": one.special, **plain}
        tokenizer["added_tokens"].append(entry)
        if has_gaps:  # the tokenizers library counts on where a token is not of the vocabulary
            vocabulary[one.content] = next_id
        next_id += 1
    return Tokenizer.from_str(json.dumps(tokenizer))


def size_of(tokenizer: Tokenizer) -> int:
    """One more than the last id."""
    return int(max(tokenizer.get_vocab().values())) + 1


def allowed(matcher: Any) -> set[int]:
    """The ids that a matcher allows next."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return {*bits.nonzero()[0].tolist()}
