"""Plain tokens have the same text wherever they stand; by an unknown decoder no token is plain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from lamina.runtime.tokenization.plain_tokens import REPLACEMENT, PlainTokens, only_joins
from lamina.runtime.tokenization.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=["bbpe", "spm"])
def tokenizer(request, bbpe_tokenizer, spm_tokenizer):
    return Tokenizer((bbpe_tokenizer if request.param == "bbpe" else spm_tokenizer)())


@given(data=st.data())
def test_a_plain_token_adds_its_text_behind_any_whole_text(tokenizer, data):
    plain = [each for each in range(tokenizer.size) if tokenizer.plain_tokens[each] is not None]
    assert len(plain) > 20
    before = data.draw(st.lists(st.integers(0, tokenizer.size - 1), min_size=1, max_size=12))
    token_id = data.draw(st.sampled_from(plain))
    text = tokenizer.decode(before)
    if text and REPLACEMENT not in text and before[-1] not in tokenizer.byte_token_ids:
        token = tokenizer.plain_tokens[token_id]
        assert tokenizer.decode([*before, token_id]) == text + token.text
        assert token.ids == [token_id]
        assert len(tokenizer.decode([token_id])) == token.num_alone


def test_special_tokens_bytes_and_parts_of_characters_are_not_plain(tokenizer):
    parts = [each for each in range(tokenizer.size) if REPLACEMENT in tokenizer.decode([each])]
    for token_id in (*tokenizer.special_tokens, *tokenizer.byte_token_ids, *parts, tokenizer.size + 5):
        assert tokenizer.plain_tokens[token_id] is None


def test_only_decoders_that_join_have_plain_tokens(tokenizer):
    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    joins = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse()])
    assert only_joins(joins)
    assert only_joins(decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip]))
    assert only_joins(decoders.ByteLevel())
    assert only_joins(decoders.Sequence([decoders.ByteLevel()]))
    for other in (
        None,
        {},
        decoders.WordPiece(),
        decoders.Metaspace(),
        decoders.CTC(),
        decoders.Sequence([replace, decoders.Fuse(), decoders.ByteFallback()]),
        decoders.Sequence([decoders.ByteLevel(), strip]),
        decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ):
        assert not only_joins(other)
        assert PlainTokens(tokenizer, other)[100] is None
