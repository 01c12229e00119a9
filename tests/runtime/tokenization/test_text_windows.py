"""Texts as windows of tokens: nothing lost or twice, each as the model reads a text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.common.errors import ConfigError, LoadError
from lamina.runtime.tokenization.text_windows import read_windows, text_windows
from lamina.runtime.tokenization.tokenizer import Tokenizer

BOS = 1
TEXTS = st.text("he llo wt\n", min_size=4, max_size=300)


@given(text=TEXTS, window=st.integers(4, 40))
def test_windows_hold_every_token_once_behind_what_begins_a_text(
    bbpe_tokenizer: Callable[[], Any],
    spm_tokenizer: Callable[[], Any],
    text: str,
    window: int,
) -> None:
    for backend, prefix in ((bbpe_tokenizer(), [BOS]), (spm_tokenizer(), [])):
        tokenizer = Tokenizer(backend)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) < 2:
            continue
        windows = text_windows(tokenizer, text, window=window)
        assert all(len(each) <= window and each[: len(prefix)] == prefix for each in windows)
        held = [token for each in windows for token in each[len(prefix) :]]
        assert held in (ids, ids[:-1])  # a last token alone would be predicted from nothing


@given(text=TEXTS, window=st.integers(4, 40), num_tokens=st.integers(2, 200))
def test_no_more_tokens_are_taken_than_asked_for_and_they_are_spread(
    bbpe_tokenizer: Callable[[], Any], text: str, window: int, num_tokens: int
) -> None:
    tokenizer = Tokenizer(bbpe_tokenizer())
    if len(tokenizer.encode(text, add_special_tokens=False)) < 2:
        return
    every = text_windows(tokenizer, text, window=window)
    taken = text_windows(tokenizer, text, num_tokens, window)
    total = sum(map(len, taken))
    assert total <= num_tokens
    assert total >= min(num_tokens, sum(map(len, every))) - window
    assert taken[0] == every[0][:num_tokens]
    assert all(any(each == whole[: len(each)] for whole in every) for each in taken)


def test_half_of_a_text_is_windows_from_all_of_it(bbpe_tokenizer: Callable[[], Any]) -> None:
    tokenizer = Tokenizer(bbpe_tokenizer())
    text = "".join(chr(ord("a") + number) * 9 for number in range(20))
    taken = text_windows(tokenizer, text, num_tokens=100, window=10)
    assert [tokenizer.decode(ids[1:2]) for ids in taken] == [*"acegikmoqs"]


def test_a_folder_without_a_tokenizer_and_numbers_that_are_none_are_refused(
    tiny_folder: Path, tiny_text_folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("hello")
    with pytest.raises(LoadError, match=r"has no tokenizer, and .*text is text"):
        read_windows(tiny_folder, text)
    for wrong in (1, 0, -3, True):
        with pytest.raises(ConfigError, match="number of tokens is"):
            read_windows(tiny_text_folder, text, wrong)
    with pytest.raises(LoadError, match="cannot be read"):
        read_windows(tiny_text_folder, tmp_path)
