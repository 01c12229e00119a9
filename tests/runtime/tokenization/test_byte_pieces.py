"""Bytes of single tokens: together they are the bytes of the text, wherever it was cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.runtime.tokenization.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=["bbpe_tokenizer", "spm_tokenizer"])
def tokenizer(request):
    """A tokenizer of each kind."""
    return Tokenizer(request.getfixturevalue(request.param)())


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40))
def test_the_bytes_of_all_tokens_are_those_of_the_text(tokenizer, text):
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    found = b"".join(map(tokenizer.bytes_of, token_ids))
    lost = " " if tokenizer.loses_first_space else ""
    assert found.decode().removeprefix(lost) == tokenizer.decode(token_ids)


def test_a_part_of_a_character_has_its_own_byte(tokenizer):
    token_ids = tokenizer.encode("é", add_special_tokens=False)
    assert b"".join(map(tokenizer.bytes_of, token_ids)).lstrip(b" ") == b"\xc3\xa9"
    assert b"\xc3" in map(tokenizer.bytes_of, token_ids)
    assert b"\xa9" in map(tokenizer.bytes_of, token_ids)


def test_special_tokens_are_their_names(tokenizer):
    assert tokenizer.bytes_of(1) == b"<s>"


def test_the_replacement_character_itself_is_three_bytes(tokenizer):
    token_ids = tokenizer.encode("\ufffd", add_special_tokens=False)
    assert b"".join(map(tokenizer.bytes_of, token_ids)).lstrip(b" ") == "\ufffd".encode()
