"""Bodies that are no JSON, or not the JSON that was wanted: one 400 that says where, soon."""

import asyncio
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.serving.errors import ApiError
from lamina.serving.protocol.chat import ChatRequest
from lamina.serving.protocol.completions import CompletionRequest
from lamina.serving.protocol.decoding import decode, decode_async

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
MEGABYTES = 10**7


NO_OBJECTS = ["[]", "null", "5", '"x"', "true", "-"]
NO_JSON = ["{", "}", '{"n":}', '{"n":1,}', "{'n':1}", "{n:1}", '{"n":01}', '{"n":1}x', '{"n":+1}', '{"n":1e}']
NO_TEXTS = [b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b'{"a":"\xff"}', b'{"\xff":1}', b"\x00"]
ODDITIES = [b"", b" ", b"[" * 10**5, b'{"a":' * 10**5, b'{"a":"\n"}', b'{"a":"\\x"}']


@pytest.mark.parametrize("body", [*(text.encode() for text in [*NO_OBJECTS, *NO_JSON]), *NO_TEXTS, *ODDITIES])
def test_what_is_no_json_object_is_a_400(refused, body):
    assert len(refused(ChatRequest, body).message) < 400


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("kind, body", [(ChatRequest, CHAT), (CompletionRequest, {"prompt": "x"})])
def test_numbers_that_json_does_not_have_are_named(refused, kind, body, number):
    at_top = json.dumps({**body, "temperature": float(number)})
    inside = json.dumps({**body, "logit_bias": {"5": float(number)}})
    anywhere = json.dumps({**body, "metadata": {"a": [float(number)]}})
    assert refused(kind, at_top.encode()).param == "temperature"
    assert refused(kind, inside.encode()).param == "logit_bias.5"
    assert refused(kind, anywhere.encode()).param == "metadata.a[0]"
    assert number in refused(kind, at_top.encode()).message


@pytest.mark.parametrize("body, found", [(b"NaN", "NaN"), (b'"\\ud800"', r"the lone surrogate \ud800")])
def test_a_body_that_is_such_a_value_itself_has_no_field_to_name(refused, body, found):
    error = refused(ChatRequest, body)
    assert (error.param, error.message.split(",")[0]) == (None, f"the body holds {found}")


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 400, "9" * 5000, "1" + "0" * 5000 + ".5"])
@pytest.mark.parametrize("field", ["temperature", "n", "seed", "max_tokens", "top_k", "priority"])
def test_numbers_beyond_all_bounds_are_named(refused, field, number):
    body = json.dumps(CHAT)[:-1] + f', "{field}": {number}}}'
    assert refused(ChatRequest, body.encode()).param == field


def test_half_a_character_is_named_where_it_stands(refused):
    body = {"messages": [*CHAT["messages"], {"role": "user", "content": "a\ud800"}]}
    error = refused(ChatRequest, body)
    assert error.param == "messages[1].content"
    assert "\\ud800" in error.message
    assert refused(CompletionRequest, {"prompt": ["x", "\udfff"]}).param == "prompt[1]"
    assert refused(CompletionRequest, {"prompt": "x", "stop": ["\ud83d"]}).param == "stop[0]"


def test_a_whole_character_of_two_halves_is_read(read):
    body = b'{"messages":[{"role":"user","content":"\\ud83d\\ude00"}]}'
    assert read(ChatRequest, body)[0].messages[0].content == "\U0001f600"


@pytest.mark.parametrize(
    "body, param",
    [
        ('{"prompt":"x","n":1,"n":2}', "n"),
        ('{"prompt":"x","prompt":"x"}', "prompt"),
        ('{"prompt":"x","made_up":1,"made_up":1}', "made_up"),
        ('{"prompt":"x","n":null,"n":2}', "n"),
        ('{"prompt":"x","logit_bias":{"5":1,"5":2}}', "logit_bias"),
        ('{"prompt":"x","\\u006e":1,"n":2}', "n"),
    ],
)
def test_a_field_given_twice_is_named(refused, body, param):
    error = refused(CompletionRequest, body.encode())
    assert error.param == param
    assert "twice" in error.message


def test_a_field_given_twice_in_a_message_is_named(refused):
    body = b'{"messages":[{"role":"user","content":"a","content":"b"}]}'
    assert refused(ChatRequest, body).param == "messages"


def test_the_one_field_that_half_a_million_hide_is_named(refused):
    names = ",".join(f'"{number}":0' for number in range(500_000))
    call = f'{{"function":{{"name":"f","arguments":{{{names},"499999":1}}}}}}'
    body = f'{{"messages":[{{"role":"assistant","tool_calls":[{call}]}}]}}'
    assert "'499999' twice" in refused(ChatRequest, body.encode()).message


def test_unknown_fields_are_listed_and_nulls_are_not():
    body = {**CHAT, "made_up": 1, "stream": True, "stream_options": {"x": 1, "y": None}, "nothing": None}
    body["messages"] = [{"role": "user", "content": "a", "annotations": []}]
    decoded = decode(ChatRequest, json.dumps(body).encode())
    names = {"made_up", "stream_options.x", "messages[0].annotations", "nothing"}
    assert set(decoded.ignored_fields) <= names
    assert set(decoded.ignored_fields) >= names - {"nothing"}
    assert decoded.headers["X-Lamina-Ignored-Fields"] == ", ".join(decoded.ignored_fields)
    assert decode(ChatRequest, json.dumps(CHAT).encode()).headers == {}


@given(names=st.lists(st.text(max_size=100), max_size=40, unique=True))
def test_the_header_of_ignored_fields_is_short_and_printable(names):
    body = {**CHAT, **{f"x{name}": 1 for name in names}}
    try:
        decoded = decode(ChatRequest, json.dumps(body).encode())
    except ApiError as error:  # half a character
        assert "surrogate" in error.message  # noqa: PT017
        return
    header = decoded.headers.get("X-Lamina-Ignored-Fields", "")
    assert len(header) < 2000
    assert all(32 <= ord(letter) < 127 for letter in header)


def test_strict_fields_refuses_what_it_does_not_know(refused):
    assert refused(ChatRequest, {**CHAT, "temprature": 1}, strict=True).param == "temprature"
    stream = {**CHAT, "stream": True, "stream_options": {"x": 1}}
    assert refused(ChatRequest, stream, strict=True).param == "stream_options.x"
    assert decode(ChatRequest, json.dumps({**CHAT, "user": "me"}).encode(), strict=True).ignored_fields == ()


HARMLESS = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
HARMLESS |= {"parallel_tool_calls": True, "prompt_cache_key": "k", "safety_identifier": "s"}


@pytest.mark.parametrize("field, value", [*HARMLESS.items(), ("user", None)])
def test_fields_that_change_no_answer_are_accepted_in_silence(field, value):
    decoded = decode(ChatRequest, json.dumps({**CHAT, field: value}).encode())
    assert decoded.ignored_fields == ()


# Made when it is sent: each worker collects this file.
HOSTILE = {
    "logit_bias": lambda: "{" + ",".join(f'"{number}":1' for number in range(700_000)) + "}",
    "stop": lambda: '["' + "x" * MEGABYTES + '"]',
    "bad_words": lambda: json.dumps(["word"] * 1_200_000),
    "metadata": lambda: json.dumps([[]] * 2_500_000),
    "seed": lambda: "9" * MEGABYTES,
    "temperature": lambda: "0." + "1" * MEGABYTES,
    "cache_salt": lambda: '"' + "\\n" * (MEGABYTES // 2) + '"',
    "made_up": lambda: json.dumps({str(number): {} for number in range(600_000)}),
    "tools": lambda: json.dumps([{}] * 2_500_000),
    "prompt": lambda: json.dumps([[]] * 2_500_000),
    "stop_token_ids": lambda: json.dumps(list(range(1_300_000))),
    "chat_template_kwargs": lambda: '{"a":' * 500_000,
}


@pytest.mark.parametrize("field", HOSTILE)
def test_ten_megabytes_of_anything_are_refused_within_little_cpu(refused, field):
    head = '{"prompt":"x",' if field != "prompt" else "{"
    body = f'{head}"{field}":{HOSTILE[field]()}}}'.encode()
    assert len(body) > 2_000_000
    started = time.thread_time()
    error = refused(CompletionRequest, body)
    spent = time.thread_time() - started
    assert len(error.message) < 400
    assert spent < 2  # seconds: a bound on the kind of work, not a measurement


def test_a_large_body_leaves_the_loop_to_others():
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 100} for _ in range(8000)]}).encode()

    async def count_turns():
        turns = 0
        decoding = asyncio.ensure_future(decode_async(ChatRequest, body))
        while not decoding.done():
            turns += 1
            await asyncio.sleep(0)
        return turns, await decoding

    turns, decoded = asyncio.run(count_turns())
    assert turns > 2
    assert len(decoded.request.messages) == 8000


@given(body=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode(errors="replace")))
def test_any_bytes_are_a_body_or_a_400(body):
    for kind in (ChatRequest, CompletionRequest):
        with pytest.raises(ApiError) as caught:
            decode(kind, body)
        assert caught.value.status == 400


@given(
    body=st.just(json.dumps({**CHAT, "stop": ["a"], "temperature": 0.5, "logit_bias": {"1": 2}}).encode()),
    cut=st.integers(0, 140),
    put=st.binary(max_size=3),
)
def test_a_damaged_body_is_read_or_a_400(body, cut, put):
    damaged = body[:cut] + put + body[cut + 1 :]
    try:
        decode(ChatRequest, damaged)
    except ApiError as error:
        assert error.status == 400  # noqa: PT017


@pytest.mark.parametrize("piece", ["[]", "{}", "7", '""', "null", '{"role":"user"}'])
def test_a_body_of_millions_of_values_is_refused_whatever_they_are(refused, piece):
    body = f'{{"prompt":[{",".join([piece] * 2_000_000)}]}}'.encode()
    assert "more than" in refused(CompletionRequest, body).message


def test_what_stands_in_a_text_is_no_value(config):
    text = 'if (a[0]) { f(\\"x, {[\\", 1); }\\n' * 100_000
    body = f'{{"messages":[{{"role":"user","content":"{text}"}}]}}'.encode()
    request = decode(ChatRequest, body).request
    assert request.conversation(config)[0]["content"].count("{[") == 100_000
