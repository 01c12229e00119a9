"""Log-probabilities as clients read them: finite, whole, and at the right character."""

import json
import math

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lamina.runtime.engine.logprobs import IMPOSSIBLE, Logprob
from lamina.runtime.tokenization.tokenizer import Tokenizer
from lamina.serving.protocol.logprobs import (
    CompletionLogprobsWriter,
    chat_logprobs,
    prompt_logprobs,
    token_names,
)

numbers = st.floats(-9999, 0) | st.sampled_from([-math.inf, math.nan, -1e300, -9999.0])


@pytest.fixture(scope="module", params=["bbpe_tokenizer", "spm_tokenizer"])
def tokenizer(request):
    """A tokenizer of each kind."""
    return Tokenizer(request.getfixturevalue(request.param)())


def place(own, *others):
    """What the engine finds in one place: the token itself, then the likeliest, each (id, number, rank)."""
    return {token_id: Logprob(number, rank) for token_id, number, rank in (own, *others)}


def strict_json(value):
    """A struct as JSON that has no NaN."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(msgspec.json.encode(value), parse_constant=refuse)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30), cut=st.integers(0, 30))
def test_every_token_is_at_its_character_of_the_text(tokenizer, text, cut):
    token_ids = tokenizer.encode(text, add_special_tokens=True)
    shown = tokenizer.decode(token_ids)
    names = token_names(tokenizer)
    writer = CompletionLogprobsWriter(
        num_top=0,
        names=names,
        is_skipped=tokenizer.special_tokens.__contains__,
        loses_space=tokenizer.loses_first_space,
    )
    found = [place((token_id, -1.0, 1)) for token_id in token_ids]
    pieces = [writer.write(token_ids[:cut], found[:cut]), writer.write(token_ids[cut:], found[cut:])]
    offsets = [offset for piece in pieces for offset in piece.text_offset]
    assert offsets == sorted(offsets)
    assert [name for piece in pieces for name in piece.tokens] == [names.name(each) for each in token_ids]
    for index, (token_id, offset) in enumerate(zip(token_ids, offsets, strict=True)):
        text_of_token = names.name(token_id)
        if token_id in tokenizer.special_tokens or "\ufffd" in text_of_token:
            continue
        is_first = all(before in tokenizer.special_tokens for before in token_ids[:index])
        if is_first and tokenizer.loses_first_space:
            text_of_token = text_of_token.removeprefix(" ")
        assert shown.startswith(text_of_token, offset)


@given(parts=st.lists(st.sampled_from(["a", " b", "<s>", "</s>"]), min_size=1, max_size=6))
def test_special_tokens_that_a_prompt_has_as_text_are_at_their_characters(tokenizer, parts):
    text = "".join(parts)
    token_ids = tokenizer.encode(text, add_special_tokens=True)
    special, names = tokenizer.special_tokens, token_names(tokenizer)
    writer = CompletionLogprobsWriter(
        num_top=0,
        names=names,
        is_skipped=special.__contains__,
        echoed=text,
        loses_space=tokenizer.loses_first_space,
    )
    piece = writer.write(token_ids, [place((token_id, -1.0, 1)) for token_id in token_ids])
    said = sum(text.count(name) for name in ("<s>", "</s>") if name in set(special.values()))
    placed = [
        offset
        for token_id, offset in zip(token_ids, piece.text_offset, strict=True)
        if token_id in special and text.startswith(names.name(token_id), offset)
    ]
    assert len(set(placed)) == said
    assert piece.text_offset == sorted(piece.text_offset)


@example(token_ids=[173, 98, 4])  # two bytes of half a surrogate, a sign each
@given(token_ids=st.lists(st.integers(4, 266), max_size=12))
def test_tokens_behind_half_a_character_are_behind_its_sign(bbpe_tokenizer, token_ids):
    tokenizer = Tokenizer(bbpe_tokenizer())
    shown, names = tokenizer.decode(token_ids), token_names(tokenizer)
    writer = CompletionLogprobsWriter(num_top=0, names=names)
    piece = writer.write(token_ids, [place((token_id, -1.0, 1)) for token_id in token_ids])
    for name, offset in zip(piece.tokens, piece.text_offset, strict=True):
        assert "\ufffd" in name or shown.startswith(name, offset), (shown, piece)


@given(number=numbers, other=numbers)
def test_numbers_are_finite_whatever_they_are(tokenizer, number, other):
    found = [place((70, number, 2), (71, other, 1))]
    names = token_names(tokenizer)
    writer = CompletionLogprobsWriter(num_top=1, names=names)
    completion = strict_json(writer.write([70], found))
    chat = strict_json(chat_logprobs(found, 1, names))
    prompt = strict_json(prompt_logprobs([None, *found]))
    told = [completion["token_logprobs"][0], chat["content"][0]["logprob"], prompt[1]["70"]["logprob"]]
    assert told == [number if number > IMPOSSIBLE else IMPOSSIBLE] * 3
    assert prompt[0] is None


def test_the_greedy_token_is_told_by_equal_numbers(tokenizer):
    writer = CompletionLogprobsWriter(num_top=1, names=token_names(tokenizer))
    piece = writer.write([70, 71], [place((70, -0.1234567890123, 1)), place((71, -2.5, 3), (72, -0.5, 1))])
    assert max(piece.top_logprobs[0].values()) == piece.token_logprobs[0]
    assert max(piece.top_logprobs[1].values()) > piece.token_logprobs[1]


def test_the_first_token_of_a_prompt_has_none(tokenizer):
    writer = CompletionLogprobsWriter(num_top=1, names=token_names(tokenizer))
    piece = strict_json(writer.write([70, 71], [None, place((71, -2.5, 1))]))
    assert piece["token_logprobs"] == [None, -2.5]
    assert piece["top_logprobs"][0] is None


def test_tokens_of_one_name_are_told_by_the_likelier_and_by_id_apart(tokenizer):
    parts = tokenizer.encode("é", add_special_tokens=False)[-2:]
    found = [place((parts[0], -3.0, 2), (parts[1], -0.5, 1))]
    by_text = CompletionLogprobsWriter(num_top=2, names=token_names(tokenizer)).write(parts[:1], found)
    by_id = CompletionLogprobsWriter(num_top=2, names=token_names(tokenizer, by_id=True))
    assert by_text.top_logprobs == [{"\ufffd": -0.5}]
    assert by_id.write(parts[:1], found).top_logprobs == [
        {f"token_id:{parts[0]}": -3.0, f"token_id:{parts[1]}": -0.5}
    ]


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12))
def test_the_bytes_of_a_chat_are_those_of_its_text(tokenizer, text):
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    found = [place((token_id, -1.0, 1)) for token_id in token_ids]
    content = chat_logprobs(found, 0, token_names(tokenizer)).content
    told = bytes(byte for token in content for byte in token.bytes).decode()
    lost = " " if tokenizer.loses_first_space else ""
    assert told.removeprefix(lost) == tokenizer.decode(token_ids, skip_special_tokens=False)
    assert all(token.top_logprobs == [] for token in content)


def test_as_many_likeliest_are_told_as_were_asked_for_in_their_order(tokenizer):
    found = [place((70, -3.0, 3), (71, -0.5, 1), (72, -1.5, 2))]
    for asked, told in ((0, []), (1, [-0.5]), (2, [-0.5, -1.5]), (3, [-0.5, -1.5, -3.0])):
        (token,) = chat_logprobs(found, asked, token_names(tokenizer)).content
        assert [top.logprob for top in token.top_logprobs] == told


def test_without_a_tokenizer_tokens_are_named_by_their_ids():
    (token,) = chat_logprobs([place((70, -3.0, 1))], 1, token_names(None)).content
    assert (token.token, token.bytes) == ("token_id:70", [])
