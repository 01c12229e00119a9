"""OpenAI's own client: whole and streamed, sync and async, its retries, and its errors."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ...engine_gate import EngineGate

MESSAGES: Any = [{"role": "user", "content": "hello"}]
GREEDY: Any = {"model": "tiny", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_comes_whole_as_it_comes_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    told = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in told) == whole.choices[0].message.content
    reasons = [choice.finish_reason for choice in told if choice.finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_the_stream_helper_builds_the_whole_answer(client: openai.OpenAI) -> None:
    text = client.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0].message.content
    assert text is not None
    stopped: Any = {**GREEDY, "stop": text[4:6]}  # the helper raises for answers that their length ends
    whole = client.chat.completions.create(messages=MESSAGES, **stopped)
    with client.chat.completions.stream(messages=MESSAGES, **stopped) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_completion_has_log_probabilities_of_its_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt=[[5, 6, 7], [8]], logprobs=2, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        told = choice.logprobs
        assert told is not None
        assert told.tokens is not None
        assert told.token_logprobs is not None
        assert len(told.tokens) == len(told.token_logprobs) == 12
        assert all(value <= 0 for value in told.token_logprobs)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24


def test_the_async_client_reads_many_streams_at_once(server: Any) -> None:
    async def read(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async def read_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(read(client) for _ in range(8)))

    texts = asyncio.run(read_all())
    assert len(set(texts)) == 1
    assert texts[0]


def test_raw_responses_carry_the_id_of_the_request(client: openai.OpenAI) -> None:
    headers = {"X-Request-Id": "mine-7"}
    raw = client.chat.completions.with_raw_response.create(messages=MESSAGES, extra_headers=headers, **GREEDY)
    assert raw.headers["x-request-id"] == "mine-7"
    parsed = raw.parse()
    assert parsed._request_id == "mine-7"


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    model = client.models.retrieve("tiny")
    assert model.owned_by == "lamina"
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 256
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another/model")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    "wrong,kind,code",
    [
        ({"temperature": -1}, openai.BadRequestError, None),
        ({"model": "another"}, openai.NotFoundError, "model_not_found"),
        (
            {"messages": [{"role": "user", "content": "long " * 400}]},
            openai.BadRequestError,
            "context_length_exceeded",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            openai.BadRequestError,
            "unsupported_field",
        ),
    ],
)
def test_what_is_wrong_raises_the_clients_own_errors(
    client: openai.OpenAI, wrong: Any, kind: type[openai.APIStatusError], code: str | None
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"messages": MESSAGES, **GREEDY, **wrong})
    assert caught.value.code == code
    assert caught.value.param == next(iter(wrong))
    assert next(iter(wrong)) in str(caught.value) or code == "context_length_exceeded"


def test_a_prompt_over_the_context_is_named_as_litellm_looks_for_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="This model's maximum context length is") as caught:
        client.completions.create(prompt="long " * 400, **GREEDY)
    assert caught.value.code == "context_length_exceeded"


def test_a_client_that_comes_too_early_is_served_once_the_model_is_loaded(
    start_server: Callable[..., Any],
) -> None:
    may_load = threading.Event()
    running = start_server(may_load=may_load)
    hasty = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    with hasty, pytest.raises(openai.InternalServerError) as caught:
        hasty.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) >= 1
    threading.Timer(0.5, may_load.set).start()
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=8) as patient:
        assert patient.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0].message.content
    running.close()


def test_a_client_over_its_limit_is_served_once_there_is_room(
    start_server: Callable[..., Any], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.one]\nkey = "sk-one"\nmax_concurrent = 1\n')
    running = start_server(api_key_file=keys)
    endless: Any = {"messages": MESSAGES, "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    engine, refusals = EngineGate.of(running.serving.runtime), []

    def give_way(response: httpx.Response) -> None:
        if response.status_code == 429:
            refusals.append(response)
        if len(refusals) == 2:  # the first was for who does not try again
            stream.close()
            engine.open()

    hooks: Any = {"response": [give_way]}
    with openai.OpenAI(
        base_url=f"{running.url}/v1",
        api_key="sk-one",
        max_retries=8,
        http_client=httpx.Client(event_hooks=hooks, timeout=60),
    ) as client:
        threading.Thread(target=engine.begin, args=(1,)).start()
        stream = client.chat.completions.create(model="tiny", stream=True, **endless)
        next(iter(stream))
        hasty = client.with_options(max_retries=0)
        with pytest.raises(openai.RateLimitError) as caught:
            hasty.chat.completions.create(messages=MESSAGES, **GREEDY)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        raw = client.chat.completions.with_raw_response.create(messages=MESSAGES, **GREEDY)
        assert raw.retries_taken >= 1
        assert raw.parse().choices[0].message.content
    running.close()


def test_a_stream_that_the_server_ends_raises_an_api_error(start_server: Callable[..., Any]) -> None:
    running = start_server(drain_timeout=0.0)
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
    with client, running.held() as engine:
        threading.Thread(target=engine.begin, args=(1,)).start()
        stream = client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, max_tokens=200, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        running.server.stop()
        with pytest.raises(openai.APIError):
            for _ in stream:
                pass
    running.close()
