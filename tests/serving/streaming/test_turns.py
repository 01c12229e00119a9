"""Requests as large as they may be leave the event loop to others: counted in its turns, never in seconds."""

import asyncio
import itertools
import threading
from collections import Counter

import pytest

from lamina import AsyncRuntime
from lamina.runtime.engine.generation import MOST_LOGPROBS
from lamina.runtime.engine.logprobs import LogprobsFormatter
from lamina.runtime.engine.outputs import StreamDelta
from lamina.runtime.tokenization.tokenizer import Tokenizer
from lamina.serving.config import ServeConfig
from lamina.serving.streaming.handlers import LARGE_ANSWER, NUM_AT_ONCE
from lamina.serving.streaming.sse import MOST_TOKENS, EventStream
from lamina.serving.tools.reader import AnswerReader

from ..reading import COMPLETIONS, whole

RESPONSES = "/v1/responses"
SHORT = {"max_tokens": 2, "ignore_eos": True, "temperature": 0}
MANY = {**SHORT, "prompt": [[1, 5, 6 + number % 90] for number in range(200)]}


class Turns:
    """Counts how often the loop of a server comes round."""

    def __init__(self, server):
        self.num, self._server = 0, server

    def __enter__(self):
        async def begin():
            self._task = asyncio.create_task(self._count())

        self._server.in_loop(begin)
        return self

    def __exit__(self, *_):
        async def end():
            self._task.cancel()

        self._server.in_loop(end)

    async def _count(self):
        while True:
            self.num += 1
            await asyncio.sleep(0)


def test_many_prompts_of_a_request_are_queued_in_turns(server, monkeypatch):
    queue, queued = AsyncRuntime.queue, []

    def noted(self, asked):
        queued.append(turns.num)
        return queue(self, asked)

    with Turns(server) as turns:
        monkeypatch.setattr(AsyncRuntime, "queue", noted)
        answer = whole(server.client, COMPLETIONS, **MANY)
    assert len(answer["choices"]) == len(queued) == 200
    assert max(Counter(queued).values()) <= NUM_AT_ONCE


@pytest.mark.parametrize("streams", [True, False])
def test_what_many_prompts_have_in_common_is_checked_once(server, monkeypatch, streams):
    encode, texts = Tokenizer.encode, []

    def noted(self, text, *args, **kwargs):
        texts.append(text)
        return encode(self, text, *args, **kwargs)

    words = [f"a{number}" for number in range(100)]
    monkeypatch.setattr(Tokenizer, "encode", noted)
    server.client.post(COMPLETIONS, json={**MANY, "bad_words": words, "stream": streams}).raise_for_status()
    assert len(texts) == 2 * len(words)


def test_prompts_of_one_request_still_draw_apart_and_as_alone(server):
    body = {**SHORT, "max_tokens": 12, "temperature": 1.5}
    drawn = whole(server.client, COMPLETIONS, **body, prompt=[[1, 5]] * 6)["choices"]
    assert len({choice["text"] for choice in drawn}) > 1
    seeded = whole(server.client, COMPLETIONS, **body, prompt=[[1, 5]] * 3, seed=7)["choices"]
    (alone,) = whole(server.client, COMPLETIONS, **body, prompt=[1, 5], seed=7)["choices"]
    assert {choice["text"] for choice in seeded} == {alone["text"]}


def test_log_probabilities_of_many_answers_are_made_beside_the_loop(server, monkeypatch):
    threads, of_answer = set(), LogprobsFormatter.of_answer

    def noted(self, logprobs):
        threads.add(threading.current_thread())
        return of_answer(self, logprobs)

    monkeypatch.setattr(LogprobsFormatter, "of_answer", noted)
    num_tokens = MOST_LOGPROBS // 32 + 1
    body = {**SHORT, "prompt": [1], "n": 32, "logprobs": 3, "max_tokens": num_tokens}
    assert len(whole(server.client, COMPLETIONS, **body)["choices"]) == 32
    assert threads
    assert server.thread not in threads


def test_calls_in_a_long_response_are_read_beside_the_loop(start_server, monkeypatch):
    threads, read = set(), AnswerReader.whole

    def noted(self, text):
        threads.add(threading.current_thread())
        return read(self, text)

    server = start_server()
    monkeypatch.setattr(AnswerReader, "whole", noted)
    monkeypatch.setattr("lamina.serving.routes.responses.LARGE_ANSWER", 8)
    assert LARGE_ANSWER > 8
    for num_tokens in (4, 40):
        body = {"input": "hello", "max_output_tokens": num_tokens, "ignore_eos": True}
        server.client.post(RESPONSES, json=body).raise_for_status()
        was_in_loop = server.thread in threads
        assert was_in_loop == (num_tokens == 4)
        threads.clear()


class Ahead:
    """What is running is far ahead of its stream: so many tokens are there to be read at once."""

    only_reader = None

    def __init__(self, num_tokens):
        self.num_left, self.num_output_tokens = num_tokens, num_tokens

    @property
    def is_read(self):
        return not self.num_left

    def notify(self, on_news):
        pass

    def read_nowait(self, most):
        num = min(most, self.num_left)
        self.num_left -= num
        return [StreamDelta(request_id="a", index=0, text="x" * num, token_ids=(1,) * num)] if num else []

    async def aclose(self):
        pass


class Plain:
    """Events that are the text alone."""

    write_text = None

    def write(self, deltas):
        return "".join(delta.text for delta in deltas).encode()

    def end(self):
        return b""


class Body:
    """Notes in which turn what is written."""

    is_full = False

    def __init__(self):
        self.num_turns, self.written = 0, []

    def begin(self, send_head, data):
        self.write(data)

    def write(self, data):
        self.written.append((self.num_turns, len(data)))

    async def end(self, data):
        self.write(data)


def test_a_stream_that_is_behind_is_written_in_turns():
    body = Body()

    async def send(message):
        pass

    async def count():
        while True:
            body.num_turns += 1
            await asyncio.sleep(0)

    async def run():
        counting = asyncio.create_task(count())
        stream = EventStream(Ahead(10 * MOST_TOKENS + 1), Plain(), ServeConfig(model_names=("tiny",)), {})
        await stream({"lamina.body": body}, asyncio.Event().wait, send)
        counting.cancel()

    asyncio.run(asyncio.wait_for(run(), 60))
    *written, _ = body.written
    turns, sizes = zip(*written, strict=True)
    assert sum(sizes) == 10 * MOST_TOKENS + 1
    assert len(sizes) > 5
    assert all(before < after for before, after in itertools.pairwise(turns))
