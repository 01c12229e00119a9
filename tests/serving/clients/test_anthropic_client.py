"""Anthropic's own client: whole and streamed messages, counts of tokens, and its errors."""

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

GREEDY: Any = {"model": "tiny", "max_tokens": 12, "extra_body": {"temperature": 0}}
MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message_comes_whole_as_it_comes_in_pieces(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=MESSAGES, system="be brief", **GREEDY)
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "tiny")
    assert whole.stop_reason == "max_tokens"
    with client.messages.stream(messages=MESSAGES, system="be brief", **GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == whole.content[0].text
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens == 12
    read = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    assert read == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_events_come_in_the_order_that_anthropic_has(client: anthropic.Anthropic) -> None:
    events = [event.type for event in client.messages.create(messages=MESSAGES, stream=True, **GREEDY)]
    assert events[:2] == ["message_start", "content_block_start"]
    assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(events[2:-3]) == {"content_block_delta"}


def test_a_prompt_is_counted_as_a_message_counts_it(client: anthropic.Anthropic) -> None:
    asked: Any = {
        "messages": [*MESSAGES, {"role": "assistant", "content": "a"}, *MESSAGES],
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    }
    counted = client.messages.count_tokens(model="tiny", **asked)
    usage = client.messages.create(**asked, **GREEDY).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_prefix_that_is_cached_is_counted_apart(client: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "a prefix of some length " * 6}]
    first, second = (client.messages.create(messages=messages, **GREEDY).usage for _ in range(2))
    assert second.cache_read_input_tokens
    total = first.input_tokens + (first.cache_read_input_tokens or 0)
    assert second.input_tokens + second.cache_read_input_tokens == total


def test_an_answer_goes_on_from_what_the_assistant_began(client: anthropic.Anthropic) -> None:
    begun: Any = [*MESSAGES, {"role": "assistant", "content": "hello w"}]
    closed: Any = [*begun, {"role": "user", "content": ""}]
    counts = [
        client.messages.count_tokens(model="tiny", messages=each).input_tokens for each in (begun, closed)
    ]
    assert counts[0] < counts[1]
    assert client.messages.create(messages=begun, **GREEDY).usage.output_tokens == 12


def test_a_stop_sequence_ends_the_text_and_is_named(client: anthropic.Anthropic) -> None:
    text = client.messages.create(messages=MESSAGES, **GREEDY).content[0].text
    stop = text[3:5]
    whole = client.messages.create(messages=MESSAGES, stop_sequences=[stop], **GREEDY)
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", stop)
    assert whole.content[0].text == text[: text.index(stop)]
    with client.messages.stream(messages=MESSAGES, stop_sequences=[stop], **GREEDY) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)
    assert final.content[0].text == whole.content[0].text


def test_an_answer_that_fills_the_context_says_so(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**{**GREEDY, "messages": MESSAGES, "max_tokens": 2000})
    usage = answer.usage
    total = usage.input_tokens + (usage.cache_read_input_tokens or 0) + usage.output_tokens
    reasons = {"model_context_window_exceeded": total == 256, "end_turn": total < 256}
    assert reasons[str(answer.stop_reason)]


def test_the_async_client_streams(server: Any) -> None:
    async def read() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client:
            whole = await client.messages.create(messages=MESSAGES, **GREEDY)
            async with client.messages.stream(messages=MESSAGES, **GREEDY) as stream:
                return whole.content[0].text, await stream.get_final_text()

    whole, streamed = asyncio.run(read())
    assert whole == streamed


@pytest.mark.parametrize(
    "wrong,kind,named",
    [
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, anthropic.BadRequestError, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            anthropic.BadRequestError,
            "image",
        ),
        ({"tools": [{"name": "f", "input_schema": {}}]}, anthropic.BadRequestError, "tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, anthropic.BadRequestError, "thinking"),
        (
            {"messages": [{"role": "user", "content": "long " * 400}]},
            anthropic.BadRequestError,
            "maximum context length",
        ),
        ({"model": "another"}, anthropic.NotFoundError, "another"),
    ],
)
def test_what_is_wrong_raises_the_clients_own_errors(
    client: anthropic.Anthropic, wrong: Any, kind: type[anthropic.APIStatusError], named: str
) -> None:
    with pytest.raises(kind) as caught:
        client.messages.create(**{"messages": MESSAGES, **GREEDY, **wrong})
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"
    assert named in caught.value.body["error"]["message"]
