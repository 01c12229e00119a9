"""However an answer ends, it ends for all: client, engine and books."""

import asyncio
import gc
import json
import random
import threading

import pytest

from lamina.runtime.engine.generation import Generation
from lamina.runtime.tokenization.tokenizer import Tokenizer
from lamina.serving.config import ServeConfig
from lamina.serving.streaming.handlers import LARGE_BODY
from lamina.serving.streaming.sse import EventStream

from ...engine_gate import comes_true
from ..reading import CHAT, COMPLETIONS, choices_of, events_of, streamed, whole

LONG = {"prompt": [1], "max_tokens": 200, "ignore_eos": True, "temperature": 0}


def finished(server):
    """How many answers have ended, by how."""
    return dict(server.in_loop(server.serving.runtime.stats)["requests"])


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_a_client_that_goes_ends_its_request(server, raw, streams, reset):
    rng = random.Random(f"{streams}{reset}")
    with server.held() as engine:  # no request can end but by its client
        for _ in range(12):
            num_answers = rng.randint(1, 3)
            connection = raw(server, **LONG, stream=streams, n=num_answers)
            engine.begin(num_answers)
            if streams:
                connection.read(rng.choice([1, 200]))
                engine.let(rng.choice([1, 5, 20]))
            connection.close(reset=reset)
            engine.wait_for(0)
        server.comes_to_rest()
    assert whole(server.client, COMPLETIONS, **{**LONG, "max_tokens": 3})["usage"]["completion_tokens"] == 3


def test_a_client_that_goes_before_its_prompts_are_read_leaves_nothing(server, raw):
    for _ in range(8):
        raw(server, **{**LONG, "prompt": [[1, 5, 6]] * 8}, stream=True).close(reset=True)
        raw(server, CHAT, messages=[{"role": "user", "content": "hello"}], max_tokens=200).close()
    server.comes_to_rest()


def test_the_next_turn_after_a_dropped_stream_is_as_if_alone(server, raw):
    prompt = list(range(20, 70))
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0}
    alone = whole(server.client, COMPLETIONS, **body)["choices"][0]["text"]
    with server.held() as engine:
        connection = raw(server, **{**LONG, "prompt": prompt}, stream=True)
        engine.begin(1)
        connection.read(400)
        connection.close()
        engine.wait_for(0)
    again = whole(server.client, COMPLETIONS, **body)
    assert again["choices"][0]["text"] == alone
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    server.comes_to_rest()


def test_characters_of_several_tokens_arrive_whole(scripted_server, bbpe_tokenizer):
    text = "a😀b👩‍👩‍👧é\u2028end"
    ids = bbpe_tokenizer().encode(text, add_special_tokens=False)
    server = scripted_server([*ids, 2])
    events = streamed(server.client, COMPLETIONS, **{**LONG, "ignore_eos": False})
    (choice,) = choices_of(events).values()
    assert choice.text == text
    assert choice.reasons == ["stop"]
    answer = whole(server.client, COMPLETIONS, **{**LONG, "ignore_eos": False})
    assert answer["choices"][0]["text"] == text


OWN_FOX = "the own brown own f own fox jumps"


@pytest.fixture(scope="module")
def fox_server(scripted_server, bbpe_tokenizer):
    """A server whose every answer is that text."""
    return scripted_server([*bbpe_tokenizer().encode(OWN_FOX, add_special_tokens=False), 2])


@pytest.mark.parametrize("stop", ["own fox", "n f", "fox jumps", "x"])
def test_no_part_of_a_stop_string_is_streamed(fox_server, stop):
    (choice,) = choices_of(streamed(fox_server.client, COMPLETIONS, **LONG, stop=stop)).values()
    assert choice.text == OWN_FOX[: OWN_FOX.index(stop)]
    assert choice.reasons == ["stop"]
    assert choice.stop_reason == stop


def test_a_stop_string_that_never_comes_holds_nothing_back_at_the_end(fox_server):
    body = {**LONG, "ignore_eos": False, "stop": ["jumps over", "zz"]}
    (choice,) = choices_of(streamed(fox_server.client, COMPLETIONS, **body)).values()
    assert choice.text == OWN_FOX


def test_an_error_after_the_first_byte_is_one_event_before_the_end(scripted_server):
    logits = [[0.0] * 320 for _ in range(6)]
    logits[2][40] = logits[3][41] = 9.0
    logits[5] = [float("nan")] * 320
    server = scripted_server(logits)
    *chunks, error, done = streamed(server.client, COMPLETIONS, **{**LONG, "prompt": [1, 5, 6]})
    assert done == "[DONE]"
    assert set(error) == {"error"}
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * len(chunks)
    assert chunks
    response = server.client.post(COMPLETIONS, json={**LONG, "prompt": [1, 5, 6]})
    assert response.status_code == 500
    assert response.json() == error
    first = server.client.post(COMPLETIONS, json={**LONG, "prompt": [1] * 6, "stream": True})
    assert first.status_code == 500, "nothing was sent yet, so the status tells"
    server.comes_to_rest()


def test_one_bad_prompt_of_several_is_named_before_anything_starts(server, client):
    server.comes_to_rest()
    before = finished(server)
    response = client.post(COMPLETIONS, json={**LONG, "prompt": [[1], [1, 2], [400]], "stream": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt[2]"
    assert finished(server) == before


def test_a_prompt_as_long_as_the_context_is_refused_by_name(client):
    for prompt in ([5] * 256, [5] * 400):
        response = client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1})
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length" in error["message"]
    answer = whole(client, COMPLETIONS, prompt=[5] * 250, max_tokens=100, ignore_eos=True)
    assert answer["usage"] == {
        "prompt_tokens": 250,
        "completion_tokens": 6,
        "total_tokens": 256,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize(
    "limits", [{"send_timeout": 0.5}, {"max_unsent_bytes": 4096, "comment_interval": 0.4}]
)
def test_a_client_that_never_reads_is_ended_with_its_connection(start_server, raw, limits):
    server = start_server(**limits)
    body = {**LONG, "max_tokens": 240, "logprobs": 20, "n": 32, "stream": True}
    connection = raw(server, receive_buffer=2048, **body)
    assert comes_true(lambda: server.is_connected(connection.socket))
    assert comes_true(lambda: not server.is_connected(connection.socket))
    server.comes_to_rest()
    assert b"[DONE]" not in connection.rest(), "all of it fitted into the sockets"


def test_a_slow_reader_gets_everything(server, raw):
    connection = raw(server, receive_buffer=2048, **LONG, n=16, logprobs=5, stream=True)
    data = b""
    while not data.endswith(b"\r\n0\r\n\r\n"):
        data += connection.read(16384) if len(data) < 200_000 else connection.socket.recv(2**20)
    body = dechunked(data.partition(b"\r\n\r\n")[2])
    choices = choices_of(events_of(body))
    answer = whole(server.client, COMPLETIONS, **LONG, n=16, logprobs=5)
    assert [choices[number].text for number in range(16)] == [each["text"] for each in answer["choices"]]


def dechunked(data):
    """The body of a response that was sent in chunks."""
    body = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        if size == b"0":
            return body
        body += data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]


def test_an_idle_stream_is_kept_alive_by_comments(start_server, raw):
    server, data = start_server(comment_interval=0.05), b""
    with server.held() as engine:
        connection = raw(server, **LONG, stream_interval=1000, stream=True)
        engine.begin(1)
        while data.count(b": keep-alive\n\n") < 2:
            data += connection.read(1)
    while not data.endswith(b"\r\n0\r\n\r\n"):
        data += connection.read(1)
    events = events_of(dechunked(data.partition(b"\r\n\r\n")[2]))
    comments = [event for event in events if isinstance(event, str) and event.startswith(":")]
    assert set(comments) == {": keep-alive"}
    (choice,) = choices_of(events).values()
    assert choice.text == whole(server.client, COMPLETIONS, **LONG)["choices"][0]["text"]


def test_a_stream_without_news_sends_one_comment_after_another() -> None:
    class Running:
        is_read, only_reader = False, None

        def notify(self, on_news):
            self.on_news = on_news

        def read_nowait(self, most):
            return []

        async def aclose(self):
            pass

    class Events:
        write_text = None

        def end(self):
            return b"the end"

    class Body:
        is_full = False

        def begin(self, send_head, data):
            self.write(data)

        def write(self, data):
            sent.append(data)
            if len(sent) == 3:
                running.is_read = True
                running.on_news()

        async def end(self, data):
            sent.append(data)

    async def send(message):
        assert message["type"] == "http.response.start"

    async def run():
        config = ServeConfig(model_names=("tiny",), comment_interval=0.01)
        scope = {"lamina.body": Body()}
        await EventStream(running, Events(), config, {})(scope, asyncio.Event().wait, send)

    running, sent = Running(), []
    asyncio.run(asyncio.wait_for(run(), 60))
    assert sent == [b": keep-alive\n\n"] * 3 + [b"the end"]


def test_a_stop_string_may_be_called_as_the_end_of_a_time_is(scripted_server, bbpe_tokenizer):
    ids = bbpe_tokenizer().encode("a deadline passes", add_special_tokens=False)
    server = scripted_server([*ids, 2])
    body = {**LONG, "stop": "deadline"}
    for headers in ({}, {"x-request-timeout": "50"}):
        response = server.client.post(COMPLETIONS, json=body, headers=headers)
        assert response.json()["choices"][0]["stop_reason"] == "deadline"
        response = server.client.post(COMPLETIONS, json={**body, "stream": True}, headers=headers)
        (choice,) = choices_of(events_of(response.content)).values()
        assert (choice.text, choice.reasons) == ("a ", ["stop"])


def test_an_error_of_one_prompt_ends_the_stream_of_all(scripted_server):
    logits = [[0.0] * 320 for _ in range(8)]
    logits[6] = [float("nan")] * 320
    server = scripted_server(logits)
    body = {**LONG, "prompt": [[1, 5, 6], [1] * 9], "n": 2}  # the second is beyond what fails
    *chunks, error, done = streamed(server.client, COMPLETIONS, **body)
    assert done == "[DONE]"
    assert set(error) == {"error"}
    assert all("error" not in chunk for chunk in chunks)
    assert server.client.post(COMPLETIONS, json=body).status_code == 500
    server.comes_to_rest()


def test_an_aborted_stream_says_so_and_ends(server, raw):
    with server.held() as engine:
        connection = raw(server, **LONG, n=2, stream=True)
        engine.begin(2)
        data = connection.read(600)
        name = data.partition(b'"id":"')[2].partition(b'"')[0].decode()
        assert server.client.post(f"/v1/requests/{name}/abort").status_code == 200
        while not data.endswith(b"\r\n0\r\n\r\n"):
            data += connection.read(1)
    choices = choices_of(events_of(dechunked(data.partition(b"\r\n\r\n")[2])))
    assert [choice.reasons for choice in choices.values()] == [["abort"], ["abort"]]
    server.comes_to_rest()


def test_a_long_stop_string_that_nothing_resembles_delays_nothing(fox_server):
    body = {**LONG, "ignore_eos": False, "stream_options": {"continuous_usage_stats": True}}
    for stop in ([], ["Z" * 30]):
        *chunks, _ = streamed(fox_server.client, COMPLETIONS, **body, stop=stop, logprobs=0)
        lengths = [len(chunk["choices"][0]["text"]) for chunk in chunks]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        said = [sum(lengths[: place + 1]) for place in range(len(lengths))]
        assert all(length >= count for length, count in zip(said, counts[:-2], strict=False))


@pytest.mark.parametrize(
    "masks",
    [
        {"top_k": 1},
        {"allowed_token_ids": [40]},
        {"logit_bias": {"40": -100, "41": 100}},
        {"bad_words": ["a", "the"]},
        {"min_tokens": 4},
    ],
)
def test_log_probabilities_of_what_cannot_be_are_numbers(client, masks):
    body = {"prompt": "hello", "max_tokens": 5, "logprobs": 20, "echo": True, **masks}
    (choice,) = whole(client, COMPLETIONS, **body)["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"])
    assert choices_of(streamed(client, COMPLETIONS, **body))[0].reasons == [choice["finish_reason"]]


def test_a_long_conversation_is_read_beside_the_loop_and_refused_by_name(client):
    messages = [{"role": "user", "content": "hello " * 20_000}]
    for body in ({"messages": messages}, {"messages": messages, "stream": True}):
        response = client.post(CHAT, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
    kept = whole(client, COMPLETIONS, prompt=messages[0]["content"], truncate_prompt_tokens=20, max_tokens=2)
    assert kept["usage"]["prompt_tokens"] == 20


def test_many_prompts_of_ids_are_echoed_beside_the_loop(server, monkeypatch):
    decode, threads = Tokenizer.decode, set()

    def noted(self, token_ids, *args, **kwargs):
        if len(token_ids) == 200:
            threads.add(threading.current_thread())
        return decode(self, token_ids, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "decode", noted)
    body = {"prompt": [[100 + number % 50] * 200 for number in range(60)], "max_tokens": 0, "echo": True}
    assert len(json.dumps(body)) > LARGE_BODY
    answer = whole(server.client, COMPLETIONS, **body)
    assert len(answer["choices"]) == 60
    assert threads
    assert server.thread not in threads


def generations():
    return [each for each in gc.get_objects() if type(each) is Generation]


def test_a_connection_at_rest_holds_no_answer(server):
    before = generations()  # that records of log may hold, of errors in other tests
    for streams in (True, False):
        server.client.post(COMPLETIONS, json={**LONG, "stream": streams, "logprobs": 5})
    server.comes_to_rest()
    assert comes_true(lambda: not [each for each in generations() if not any(each is b for b in before)])
