"""A stream says what the whole answer says, whatever is asked and however its pieces are cut."""

import concurrent.futures

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.runtime.engine.output_processor import Reader

from ..reading import CHAT, COMPLETIONS, choices_of, streamed, whole

PROMPTS = st.one_of(
    st.text("he lowt\n😀é", min_size=1, max_size=12),
    st.lists(st.integers(4, 300), min_size=1, max_size=12),
)
SAMPLING = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**31)},
    optional={
        "n": st.integers(1, 3),
        "temperature": st.sampled_from([0, 0.5, 1.0]),
        "top_k": st.integers(1, 50),
        "presence_penalty": st.sampled_from([-1.0, 0.5]),
        "stop": st.lists(st.text("etao \n", min_size=1, max_size=2), max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "ignore_eos": st.booleans(),
        "stream_interval": st.integers(1, 9),
        "return_token_ids": st.booleans(),
    },
)


def assert_same(events, answer, text_of):
    choices, usage = choices_of(events), answer["usage"]
    assert sorted(choices) == [choice["index"] for choice in answer["choices"]]
    for expected in answer["choices"]:
        got = choices[expected["index"]]
        assert got.text == text_of(expected)
        assert got.reasons == [expected["finish_reason"]]
        assert got.stop_reason == expected["stop_reason"]
        assert got.token_ids == expected.get("token_ids", [])
        assert_same_logprobs(got.logprobs, expected["logprobs"] or {})
    *chunks, last, _ = events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == usage["completion_tokens"]
    assert last["usage"]["prompt_tokens"] == usage["prompt_tokens"]
    assert not any("usage" in chunk for chunk in chunks)


def assert_same_logprobs(got, expected):
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        assert len(got[name]) == len(values)
        for mine, other in zip(got[name], values, strict=True):
            assert_close(mine, other)


def assert_close(mine, other):
    """Equal but for rounding: a step's other rows may change the last bits of a logit."""
    assert type(mine) is type(other)
    if isinstance(mine, float):
        assert mine == pytest.approx(other, abs=1e-3)
    elif isinstance(mine, dict):
        assert mine.keys() == other.keys()
        for name in mine:
            assert_close(mine[name], other[name])
    elif isinstance(mine, list):
        assert len(mine) == len(other)
        for one, two in zip(mine, other, strict=True):
            assert_close(one, two)
    else:
        assert mine == other


@settings(max_examples=30)
@given(
    prompts=st.one_of(PROMPTS, st.lists(st.text("helo", min_size=1, max_size=5), min_size=2, max_size=3)),
    sampling=SAMPLING,
    max_tokens=st.integers(0, 24),
    logprobs=st.one_of(st.none(), st.integers(0, 3)),
    echo=st.booleans(),
)
def test_a_completion_is_the_same_streamed(client, prompts, sampling, max_tokens, logprobs, echo):
    body = {"prompt": prompts, **sampling, "max_tokens": max_tokens, "logprobs": logprobs, "echo": echo}
    answer = whole(client, COMPLETIONS, **{**body, "stream_interval": 1})
    events = streamed(client, COMPLETIONS, **body, stream_options={"include_usage": True})
    assert_same(events, answer, lambda choice: choice["text"])


@settings(max_examples=20)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=1, max_size=3),
    sampling=SAMPLING,
    max_tokens=st.integers(1, 24),
    logprobs=st.sampled_from([{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}]),
)
def test_a_chat_is_the_same_streamed(client, texts, sampling, max_tokens, logprobs):
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    body = {"messages": messages, **sampling, **logprobs, "max_completion_tokens": max_tokens}
    answer = whole(client, CHAT, **{**body, "stream_interval": 1})
    events = streamed(client, CHAT, **body, stream_options={"include_usage": True})
    assert_same(events, answer, lambda choice: choice["message"]["content"])
    assert all(choice.roles == ["assistant"] for choice in choices_of(events).values())


def test_offsets_are_those_of_the_text(client):
    answer = whole(client, COMPLETIONS, prompt="hello", max_tokens=20, logprobs=0, echo=True, temperature=0)
    (choice,) = answer["choices"]
    told = choice["logprobs"]
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    assert choice["text"].startswith("hello")
    places = [*told["text_offset"], len(choice["text"])]
    for token, start, end in zip(told["tokens"], places, places[1:], strict=False):
        is_whole = "\ufffd" not in choice["text"][start : end + 1] + token
        if is_whole and token not in ("<s>", "<pad>", "<|end|>"):
            assert choice["text"][start:end] == token


def test_a_prompt_alone_has_its_log_probabilities(client):
    asked = {"prompt": "hello hello", "max_tokens": 0, "logprobs": 1, "echo": True}
    answer = whole(client, COMPLETIONS, **asked)
    (choice,) = answer["choices"]
    assert choice["text"] == "hello hello"
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    longer = whole(client, COMPLETIONS, **{**asked, "max_tokens": 1})["choices"][0]["logprobs"]
    for own, top in zip(longer["token_logprobs"][1:], longer["top_logprobs"][1:], strict=True):
        assert own <= max(top.values())


def test_prompts_are_numbered_one_after_the_other(client):
    body = {"prompt": ["hello", "the", "low"], "max_tokens": 6, "temperature": 0, "n": 2}
    answer = whole(client, COMPLETIONS, **body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    for number, prompt in enumerate(body["prompt"]):
        alone = whole(client, COMPLETIONS, prompt=prompt, max_tokens=6, temperature=0)["choices"][0]["text"]
        texts = [choice["text"] for choice in answer["choices"]][2 * number : 2 * number + 2]
        assert texts == [alone, alone]


def test_continuous_usage_grows_to_what_the_end_says(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "hello", "n": 2, "max_tokens": 9, "stream_options": options}
    *chunks, last, _ = streamed(client, COMPLETIONS, **body)
    told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert told == sorted(told)
    assert told[-1] == last["usage"]["completion_tokens"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}


def test_the_length_asked_for_is_counted(client):
    answer = whole(client, COMPLETIONS, prompt="hello", max_tokens=5, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "length"
    assert whole(client, COMPLETIONS, prompt="hello", ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_cached_tokens_of_a_prompt_are_told(client):
    body = {"prompt": list(range(10, 90)), "max_tokens": 2, "ignore_eos": True, "cache_salt": "of this test"}
    first = whole(client, COMPLETIONS, **body)["usage"]
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    again = whole(client, COMPLETIONS, **body)["usage"]
    assert 60 <= again["prompt_tokens_details"]["cached_tokens"] < 80
    last = streamed(client, COMPLETIONS, **body, stream_options={"include_usage": True})[-2]
    assert last["usage"] == again


def test_many_streams_at_once_are_each_what_they_are_alone(client):
    bodies = [
        {"prompt": f"hello {number}", "max_tokens": 12, "temperature": 1.0, "seed": number, "logprobs": 0}
        for number in range(64)
    ]

    def answer(body):
        choice = choices_of(streamed(client, COMPLETIONS, **body))[0]
        return choice.text, choice.logprobs["tokens"], choice.reasons

    alone = [answer(body) for body in bodies]
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        assert list(pool.map(answer, bodies)) == alone


def test_equal_fingerprints_are_told_by_every_answer(client):
    answer = whole(client, COMPLETIONS, prompt="hello", max_tokens=1)
    chunk = streamed(client, CHAT, messages=[{"role": "user", "content": "hello"}], max_tokens=1)[0]
    assert answer["system_fingerprint"] == chunk["system_fingerprint"]
    assert answer["system_fingerprint"].startswith("fp_")


def test_a_model_without_a_tokenizer_streams_ids(start_server, tiny_folder):
    """Its text is empty, in the first piece and in all that follow."""
    client = start_server(folder=tiny_folder).client
    body = {"prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    (answer,) = whole(client, COMPLETIONS, **body, return_token_ids=True)["choices"]
    got = choices_of(streamed(client, COMPLETIONS, **body, return_token_ids=True))[0]
    assert (got.text, got.reasons, got.token_ids) == ("", ["length"], answer["token_ids"])
    got = choices_of(streamed(client, COMPLETIONS, **body))[0]
    assert (got.text, got.reasons) == ("", ["length"])


def test_what_fails_as_a_piece_is_written_ends_the_stream(start_server, tiny_text_folder, monkeypatch):
    """With an error event, whichever piece it is: a client would wait for ever."""
    client = start_server(folder=tiny_text_folder).client
    body = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    with monkeypatch.context() as patched:
        patched.setattr(Reader, "read_text", lambda self, most: 1 / 0)
        events = streamed(client, COMPLETIONS, **body)
    assert events[-2]["error"]["type"] == "server_error"
    assert events[-1] == "[DONE]"
    assert choices_of(streamed(client, COMPLETIONS, **body))[0].reasons == ["length"]
