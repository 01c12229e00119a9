"""Streamed text: never taken back, never past a stop string, in the end what decoding at once gives."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.runtime.tokenization.detokenizer import WINDOW, IncrementalDetokenizer, text_after
from lamina.runtime.tokenization.tokenizer import Tokenizer

from .test_stop_strings import Scripted

REPLACEMENT = "\ufffd"
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [" ", "  ", "\n", "hello", " world", "12", "3.5", ".", "'s", "é", "你好", "😀", "👩‍👧", "�"]
        ),
        st.text(max_size=6),
    ),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module", params=["bbpe", "spm", "unigram"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "unigram":
        return Tokenizer(unigram_tokenizer())
    make: Callable[[], Any] = request.getfixturevalue(f"{request.param}_tokenizer")
    return Tokenizer(make())


@pytest.fixture(scope="module")
def bbpe(bbpe_tokenizer: Callable[[], Any]) -> Tokenizer:
    return Tokenizer(bbpe_tokenizer())


@pytest.fixture(scope="module")
def spm(spm_tokenizer: Callable[[], Any]) -> Tokenizer:
    return Tokenizer(spm_tokenizer())


def unigram_tokenizer() -> Any:
    """SentencePiece's other model, with the decoder that strips by place and not by character."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁▁",
        "▁hello",
        "▁world",
    ]
    names += [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = [(name, -1.0 - place / 1000) for place, name in enumerate(names)]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.add_special_tokens(names[:3])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def stream(
    tokenizer: Tokenizer, token_ids: Sequence[int], **settings: Any
) -> tuple[list[str], IncrementalDetokenizer]:
    """The delta of every token and of the end, and the detokenizer afterwards."""
    detokenizer = IncrementalDetokenizer(tokenizer, **settings)
    deltas = [detokenizer.append([token_id]) for token_id in token_ids]
    return [*deltas, detokenizer.finish()], detokenizer


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


# Equal to decoding at once


@given(text=TEXTS, skip=st.booleans(), data=st.data())
def test_deltas_join_to_the_decoded_whole(
    tokenizer: Tokenizer, text: str, skip: bool, data: st.DataObject
) -> None:
    token_ids = ids_of(tokenizer, text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=4)))
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    chunks = [token_ids[i:j] for i, j in zip([0, *cuts], [*cuts, len(token_ids)], strict=True)]
    joined = "".join([*(detokenizer.append(chunk) for chunk in chunks), detokenizer.finish()])
    assert joined == tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert detokenizer.num_tokens == len(token_ids)


@given(data=st.data(), skip=st.booleans())
def test_any_ids_at_all_join_to_the_decoded_whole(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = st.one_of(
        st.integers(0, tokenizer.size + 3),  # a few that the tokenizer does not know
        st.sampled_from(sorted(tokenizer.byte_token_ids) or [0]),
        st.sampled_from(sorted(tokenizer.special_tokens)),
    )
    token_ids = data.draw(st.lists(ids, max_size=60))
    deltas, _ = stream(tokenizer, token_ids, skip_special_tokens=skip)
    assert "".join(deltas) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@given(text=TEXTS)
def test_at_every_moment_what_was_given_out_begins_the_final_text(tokenizer: Tokenizer, text: str) -> None:
    token_ids = ids_of(tokenizer, text)
    whole, given_out = tokenizer.decode(token_ids), ""
    for delta in stream(tokenizer, token_ids)[0]:
        given_out += delta
        assert whole.startswith(given_out)


@given(data=st.data(), skip=st.booleans())
def test_the_text_of_an_answer_is_what_it_adds_to_the_text_of_the_prompt(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = st.one_of(
        st.integers(0, tokenizer.size + 3),
        st.sampled_from(sorted(tokenizer.byte_token_ids) or [0]),
        st.sampled_from(ids_of(tokenizer, "hello world é😀 你") + sorted(tokenizer.special_tokens)),
    )
    prompt, answer = (data.draw(st.lists(ids, max_size=size)) for size in (30, 60))
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + answer, skip_special_tokens=skip)
    deltas, _ = stream(tokenizer, answer, prompt_token_ids=prompt, skip_special_tokens=skip)
    if whole.startswith(before):
        assert "".join(deltas) == whole.removeprefix(before)
    else:  # the answer completes a character that the prompt began, or spoils a run of bytes
        assert whole.endswith("".join(deltas))


@pytest.mark.parametrize("prompt", ["", "hello", "hello ", "a 你", "hello" * 50])
def test_the_first_word_of_an_answer_keeps_its_space(spm: Tokenizer, prompt: str) -> None:
    prompt_ids, answer = ids_of(spm, prompt), ids_of(spm, "world.")
    deltas, detokenizer = stream(spm, answer, prompt_token_ids=prompt_ids, stop=[" world"] if prompt else [])
    assert "".join(deltas) == ("" if prompt else "world.")
    assert detokenizer.stop_reason == (" world" if prompt else None)
    assert text_after(spm, prompt_ids, answer) == (" world." if prompt else "world.")


def test_a_character_that_the_prompt_began_and_the_answer_completes_belongs_to_the_answer(
    tokenizer: Tokenizer,
) -> None:
    begun = ids_of(tokenizer, "a😀")
    for num_bytes in (1, 2, 3):
        prompt, answer = begun[:-num_bytes], [*begun[-num_bytes:], *ids_of(tokenizer, "b")[-1:]]
        assert text_after(tokenizer, prompt, answer) == "😀b"
        assert text_after(tokenizer, prompt, []) == ""


def test_a_character_in_four_tokens_comes_whole(bbpe: Tokenizer) -> None:
    token_ids = ids_of(bbpe, "😀a")
    assert len(token_ids) == 5
    assert stream(bbpe, token_ids)[0] == ["", "", "", "😀", "a", ""]


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_character_cut_short_is_flushed_as_decoding_at_once_gives_it(
    tokenizer: Tokenizer, num_bytes: int
) -> None:
    whole = ids_of(tokenizer, "a😀")
    token_ids = whole[: len(whole) - 4 + num_bytes]
    deltas, _ = stream(tokenizer, token_ids)
    assert REPLACEMENT not in "".join(deltas[:-1])
    assert "".join(deltas) == tokenizer.decode(token_ids)
    assert deltas[-1].endswith(REPLACEMENT)


def test_one_bad_byte_spoils_the_whole_run_of_sentencepiece_bytes(spm: Tokenizer) -> None:
    run = [*ids_of(spm, "你")[-3:], ids_of(spm, "\xff")[-1]]
    deltas, _ = stream(spm, run)
    assert "".join(deltas) == spm.decode(run) == REPLACEMENT * 4


def test_a_replacement_character_that_the_model_writes_is_kept(tokenizer: Tokenizer) -> None:
    token_ids = ids_of(tokenizer, f"a{REPLACEMENT}b{REPLACEMENT}")
    assert "".join(stream(tokenizer, token_ids)[0]) == f"a{REPLACEMENT}b{REPLACEMENT}"


def test_sentencepiece_words_keep_their_spaces(spm: Tokenizer) -> None:
    token_ids = ids_of(spm, "hello world  hello")
    deltas, _ = stream(spm, token_ids)
    assert "".join(deltas) == "hello world  hello" == spm.decode(token_ids)


def test_a_hidden_special_token_does_not_eat_the_space_after_it(spm: Tokenizer) -> None:
    hello = ids_of(spm, "hello")
    token_ids = hello + [2, *hello] * (2 * WINDOW)
    assert "".join(stream(spm, token_ids)[0]) == spm.decode(token_ids) == "hello" + " hello" * 2 * WINDOW


@pytest.mark.parametrize(
    "text", ["he said : ' no ' , i ' m 3 . 5 !", "a .  b n't", " 's  've", "1 000 , 000 ."]
)
def test_spaces_before_punctuation_stay_as_the_model_wrote_them(tokenizer: Tokenizer, text: str) -> None:
    token_ids = ids_of(tokenizer, text)
    assert "".join(stream(tokenizer, token_ids)[0]) == tokenizer.decode(token_ids)


def test_the_work_for_a_token_does_not_grow_with_the_text(bbpe: Tokenizer) -> None:
    class Counted(Scripted):
        longest = 0

        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            self.longest = max(self.longest, len(token_ids))
            return bbpe.decode(token_ids, skip_special_tokens)

    counted = Counted("")
    token_ids = ids_of(bbpe, "hello wörld 😀 " * 200)
    assert "".join(counted.stream(*token_ids)[0]) == bbpe.decode(token_ids)
    assert counted.longest <= WINDOW + 5


# Stop strings


def test_a_stop_string_is_found_in_bytes_that_are_still_uncertain(spm: Tokenizer) -> None:
    token_ids = ids_of(spm, "hello\nworld")
    deltas, detokenizer = stream(spm, token_ids, stop=["\n"])
    assert "".join(deltas) == "hello"
    assert detokenizer.num_tokens == token_ids.index(ids_of(spm, "\n")[-1]) + 1


@given(text=TEXTS, data=st.data())
def test_text_never_goes_past_the_first_stop_string(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    token_ids = ids_of(tokenizer, text)
    whole = tokenizer.decode(token_ids)
    stops = data.draw(
        st.lists(st.sampled_from(["\n", "o w", "好", "😀", ".", "  ", "ell"]), min_size=1, max_size=3)
    )
    deltas, detokenizer = stream(tokenizer, token_ids, stop=stops)
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    if not ends:
        assert "".join(deltas) == whole
        return
    complete = max((stop for stop in stops if whole[: min(ends)].endswith(stop)), key=len)
    assert "".join(deltas) == whole[: min(ends) - len(complete)]
    assert detokenizer.stop_reason == complete
    assert complete in tokenizer.decode(token_ids[: detokenizer.num_tokens])
    assert complete not in tokenizer.decode(token_ids[: detokenizer.num_tokens - 1])


def test_a_stop_of_a_replacement_character_is_not_met_within_a_character(
    bbpe_tokenizer: Callable[[], Any],
) -> None:
    tokenizer = Tokenizer(bbpe_tokenizer())
    ids = tokenizer.encode("h日", add_special_tokens=False)
    broken = ids[1:2]
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["\ufffd"])
    assert detokenizer.append(ids) + detokenizer.append(ids) == "h日" * 2
    assert detokenizer.stop_reason is None
    assert detokenizer.append([*broken, ids[0], ids[0]]) == ""
    assert detokenizer.stop_reason == "\ufffd"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["\ufffd", "h\ufffd"])
def test_a_character_that_the_end_leaves_incomplete_is_one_that_stops(
    tokenizer: Tokenizer, stop: str, include: bool
) -> None:
    """Its text is � from then on, and no answer holds a stop string that was not asked to be in it."""
    *_, cut = (ids_of(tokenizer, "hh😀")[:-count] for count in range(1, 4))
    assert tokenizer.decode(cut).endswith(stop)
    before = tokenizer.decode(cut).partition(stop)[0]
    deltas, detokenizer = stream(tokenizer, cut, stop=[stop], include_stop_str_in_output=include)
    assert ("".join(deltas), detokenizer.stop_reason) == (before + stop * include, stop)
    deltas, detokenizer = stream(tokenizer, cut, stop=[stop], min_tokens=len(cut))
    assert ("".join(deltas), detokenizer.stop_reason) == (tokenizer.decode(cut), None)


def test_a_stop_in_what_the_end_leaves_incomplete_comes_before_a_stop_token(bbpe: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(bbpe, stop=["\ufffd"], include_stop_str_in_output=True)
    text = detokenizer.append(ids_of(bbpe, "h日")[:-1])
    text += detokenizer.append_stop_token(next(iter(bbpe.special_tokens)))
    assert (text, detokenizer.stop_reason) == ("h\ufffd", "\ufffd")


@given(text=TEXTS, data=st.data())
def test_no_stop_string_is_left_in_a_text_that_ends_anywhere(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    token_ids = ids_of(tokenizer, text)
    token_ids = token_ids[: data.draw(st.integers(0, len(token_ids)))]
    stops = data.draw(st.lists(st.sampled_from(["\ufffd", "l\ufffd", "\ufffd\ufffd", "😀"]), min_size=1))
    deltas, detokenizer = stream(tokenizer, token_ids, stop=stops)
    assert not any(stop in "".join(deltas) for stop in stops)
    if not any(stop in tokenizer.decode(token_ids) for stop in stops) and detokenizer.stop_reason is None:
        assert "".join(deltas) == tokenizer.decode(token_ids)
