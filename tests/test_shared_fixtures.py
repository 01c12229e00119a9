"""The shared fixtures are what their docstrings say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

SLOTS = ("bbpe_tokenizer", "spm_tokenizer")


def test_tiny_folders_repeat_and_follow_their_settings(make_tiny_folder, tiny_reference):
    first = tiny_reference(make_tiny_folder(attention_bias=True))
    other = tiny_reference(make_tiny_folder(attention_bias=True, seed=1))
    assert first.model.layers[0].self_attn.q_proj.bias.abs().max() > 0
    assert (first.lm_head.weight != other.lm_head.weight).any()
    assert make_tiny_folder(attention_bias=True) == make_tiny_folder(attention_bias=True)
    assert tiny_reference(make_tiny_folder()).config.num_key_value_heads == 2


@pytest.mark.parametrize("fixture", SLOTS)
@given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_tokenizers_bring_any_text_back(text, fixture, request):
    tokenizer = request.getfixturevalue(fixture)()
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


@pytest.mark.parametrize("fixture", SLOTS)
def test_tokenizers_fit_the_tiny_vocabulary(fixture, request):
    tokenizer = request.getfixturevalue(fixture)()
    assert len(tokenizer) <= 320
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_text_folder_holds_a_chat_template(tiny_text_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_text_folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == "<s>[user]hello</s>"
