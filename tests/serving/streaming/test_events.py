"""Chunks as events: whatever is wanted beside the text, and however it comes, they say the same."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.runtime.engine.outputs import StreamDelta
from lamina.serving.errors import ApiError
from lamina.serving.streaming.events import ChunkEvents
from lamina.serving.streaming.response_settings import CHAT, COMPLETION, AnsweredPrompt, ResponseSettings

from ..reading import events_of

ASKED = ResponseSettings(id="x-1", created=7, model="tiny", fingerprint="fp_1")
ONE_PROMPT = (AnsweredPrompt(token_ids=(1,)),)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)


def usage(num_tokens):
    return {"completion_tokens": num_tokens}


def piece(text, *token_ids, index=0, **more):
    return StreamDelta(request_id="r", index=index, text=text, token_ids=token_ids, **more)


def written(reads, style=CHAT, prompts=ONE_PROMPT, **asked):
    """The events of a stream that reads these lists of deltas."""
    events = ChunkEvents(dataclasses.replace(ASKED, **asked), style, prompts, usage)
    return events_of(b"".join([*map(events.write, reads), events.end()]))


def text_of(chunk, style):
    choice = chunk["choices"][0]
    return choice["delta"].get("content", "") if style is CHAT else choice["text"]


@pytest.mark.parametrize("style", [CHAT, COMPLETION])
@given(texts=st.lists(TEXTS, min_size=1, max_size=6), interval=st.integers(1, 4), ids=st.booleans())
def test_whatever_the_text_it_arrives_whole_with_one_reason_for_the_end(style, texts, interval, ids):
    deltas = [piece(text, number) for number, text in enumerate(texts)]
    deltas[-1] = dataclasses.replace(deltas[-1], finish_reason="stop")
    *chunks, done = written(
        [[delta] for delta in deltas], style, stream_interval=interval, return_token_ids=ids
    )
    assert done == "[DONE]"
    assert "".join(text_of(chunk, style) for chunk in chunks) == "".join(texts)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert text_of(chunks[-1], style) == ""
    assert {chunk["id"] for chunk in chunks} == {"x-1"}
    if ids:
        told = [token_id for chunk in chunks for token_id in chunk["choices"][0].get("token_ids", [])]
        assert told == list(range(len(texts)))


def test_the_first_chunk_of_a_chat_alone_has_the_role():
    chunks = written([[piece("a", 5)], [piece("b", 6)], [piece("c", 7, finish_reason="length")]])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas == [{"role": "assistant", "content": "a"}, {"content": "b"}, {"content": "c"}, {}]


def test_a_first_token_without_text_is_told_at_once_and_a_later_one_is_not():
    events = ChunkEvents(ASKED, CHAT, [AnsweredPrompt(token_ids=(1,))], usage)
    (first,) = events_of(events.write([piece("", 5)]))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events.write([piece("", 6)]) == b""


def test_usage_stands_in_one_chunk_without_choices_before_the_end():
    reads = [[piece("a", 5, 6)], [piece("b", 7, finish_reason="stop")]]
    *chunks, last, _ = written(reads, include_usage=True)
    assert last["choices"] == []
    assert last["usage"] == {"completion_tokens": 3}
    assert not any("usage" in chunk for chunk in chunks)
    *chunks, _ = written(reads, continuous_usage=True)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [2, 3, 3]


def test_several_answers_keep_their_own_index_and_end():
    reads = [
        [piece("a", 5, index=1), piece("b", 6)],
        [piece("c", 7, index=1, finish_reason="length", stop_reason=None)],
        [piece("", 8, finish_reason="stop", stop_reason="END")],
    ]
    chunks = written(reads, COMPLETION, [AnsweredPrompt(token_ids=(1,)), AnsweredPrompt(token_ids=(2,))])[:-1]
    ends = {
        choice["index"]: choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]
    }
    assert ends[0]["stop_reason"] == "END"
    assert ends[1]["finish_reason"] == "length"
    assert len(ends) == sum(bool(chunk["choices"][0]["finish_reason"]) for chunk in chunks) == 2


def test_an_echo_comes_before_the_first_text_of_each_answer():
    prompts = [AnsweredPrompt(token_ids=(1, 9), num_answers=2, text="Say: ")]
    reads = [[piece("x", 5, index=1, finish_reason="length")], [piece("y", 6, finish_reason="length")]]
    chunks = written(reads, COMPLETION, prompts, echo=True, return_token_ids=True)[:-1]
    starts = [chunk["choices"][0] for chunk in chunks if "prompt_token_ids" in chunk["choices"][0]]
    assert [(start["index"], start["text"]) for start in starts] == [(1, "Say: x"), (0, "Say: y")]
    assert starts[0]["prompt_token_ids"] == [1, 9]


def test_a_prompt_alone_has_no_token_of_an_answer():
    reads = [[piece("x", 5, finish_reason="stop", stop_reason="x")]]
    prompts = [AnsweredPrompt(token_ids=(1, 9), text="Say: ")]
    *chunks, last, _ = written(
        reads, COMPLETION, prompts, echo=True, omits_answer=True, include_usage=True, return_token_ids=True
    )
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Say: ", ""]
    assert chunks[0]["choices"][0]["token_ids"] == []
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"][0]["stop_reason"] is None
    assert last["usage"] == {"completion_tokens": 0}


def test_an_error_is_one_event_before_the_end():
    events = ChunkEvents(ASKED, CHAT, [AnsweredPrompt(token_ids=(1,))], usage)
    error, done = events_of(events.fail(ApiError(status=500, message="no \u2028 line")))
    assert error["error"]["message"] == "no \u2028 line"
    assert done == "[DONE]"
