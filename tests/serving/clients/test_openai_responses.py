"""OpenAI's own client at /v1/responses: whole, streamed, parsed, kept, gone on from, and cancelled."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response

GREEDY: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def checked(response: Response) -> Response:
    """The same, held to the client's own types, which it reads leniently by itself."""
    return Response.model_validate(response.to_dict(), strict=True)


def test_a_response_says_what_a_chat_says(client: openai.OpenAI) -> None:
    response = checked(client.responses.create(input="hello", instructions="be brief", **GREEDY))
    chat = client.chat.completions.create(
        model="tiny",
        temperature=0,
        max_tokens=12,
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 12
    assert response.usage.total_tokens == chat.usage.total_tokens
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_what_was_asked_is_given_back(client: openai.OpenAI) -> None:
    asked: Any = {"instructions": "be brief", "metadata": {"of": "a test"}, "top_p": 0.5}
    response = client.responses.create(input="hello", **asked, **GREEDY)
    assert response.to_dict() | asked == response.to_dict()
    assert response.temperature == 0
    assert response.max_output_tokens == 12
    assert response.model == "tiny"


def test_items_of_a_conversation_go_on_as_messages_of_a_chat_do(client: openai.OpenAI) -> None:
    first = client.responses.create(input="hello", **GREEDY)
    items: Any = [
        {"role": "user", "content": "hello"},
        *(item.to_dict() for item in first.output),
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "low"}]},
    ]
    chat = client.chat.completions.create(
        model="tiny",
        temperature=0,
        max_tokens=12,
        messages=[
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "low"},
        ],
    )
    response = client.responses.create(input=items, **GREEDY)
    assert response.output_text == chat.choices[0].message.content


def test_a_stored_response_is_gone_on_from_retrieved_and_deleted(client: openai.OpenAI) -> None:
    first = client.responses.create(input="hello", instructions="be brief", store=True, **GREEDY)
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    went_on = client.responses.create(
        input="low", previous_response_id=first.id, instructions="be loud", **GREEDY
    )
    chat = client.chat.completions.create(
        model="tiny",
        temperature=0,
        max_tokens=12,
        messages=[
            {"role": "system", "content": "be loud"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "low"},
        ],
    )
    assert went_on.output_text == chat.choices[0].message.content
    assert went_on.previous_response_id == first.id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(first.id)
    assert caught.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(input="low", previous_response_id=first.id, **GREEDY)
    assert (refused.value.param, refused.value.code) == (
        "previous_response_id",
        "previous_response_not_found",
    )


def test_a_response_is_not_stored_unless_asked(client: openai.OpenAI) -> None:
    response = client.responses.create(input="hello", **GREEDY)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(response.id)


def test_the_events_come_in_their_order(client: openai.OpenAI) -> None:
    whole = client.responses.create(input="hello", **GREEDY)
    events = list(client.responses.create(input="hello", stream=True, **GREEDY))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(names[4:-4]) == {"response.output_text.delta"}
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    for event in events:
        type(event).model_validate(event.to_dict(), strict=True)
    last: Any = events[-1]
    assert "".join(event.delta for event in events[4:-4] if event.type == names[4]) == whole.output_text
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage


def test_the_stream_helper_builds_the_whole_response(client: openai.OpenAI) -> None:
    text = client.responses.create(input="hello", **GREEDY).output_text
    stopped: Any = {**GREEDY, "extra_body": {"stop": text[4:6]}}  # the helper knows complete ones alone
    whole = client.responses.create(input="hello", **stopped)
    assert whole.status == "completed"
    with client.responses.stream(input="hello", **stopped) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert final.status == "completed"


class Answer(pydantic.BaseModel):
    """What is to be parsed."""

    is_it: bool
    which: list[bool] = pydantic.Field(max_length=2)


def test_an_answer_is_parsed_as_a_model_of_pydantic(client: openai.OpenAI) -> None:
    asked: Any = {**GREEDY, "max_output_tokens": 200, "temperature": 1.0}
    parsed = None
    for seed in range(8):  # blanks without end are JSON too, and cut off
        raw = client.responses.with_raw_response.parse(
            input="hello", text_format=Answer, extra_body={"seed": seed}, **asked
        )
        if json.loads(raw.text)["status"] == "completed":
            parsed = raw.parse().output_parsed
            break
    assert isinstance(parsed, Answer)
    events = list(
        client.responses.create(
            input="hello",
            stream=True,
            text={"format": {"type": "json_object"}},
            extra_body={"seed": 1},
            **asked,
        )
    )
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.output_text.lstrip().startswith("{")


@pytest.fixture(scope="module")
def long_server(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, tiny_text_folder: Path
) -> Any:
    """A server of two keys whose TINY model has a context that takes seconds to fill."""
    base = tmp_path_factory.mktemp("responses")
    shutil.copytree(tiny_text_folder, base / "model")
    config = json.loads((base / "model" / "config.json").read_text())
    (base / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    (base / "keys.toml").write_text('[keys.one]\nkey = "sk-one"\n[keys.two]\nkey = "sk-two"\n')
    return start_server(folder=base / "model", api_key_file=base / "keys.toml")


@pytest.fixture(scope="module")
def owner(long_server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{long_server.url}/v1", api_key="sk-one", max_retries=0) as client:
        yield client


ENDLESS: Any = {"model": "tiny", "input": "hello", "max_output_tokens": 3900, "stream": True}
ENDLESS["extra_body"] = {"ignore_eos": True}


@pytest.mark.parametrize("store", [False, True])
def test_a_running_response_is_cancelled_by_its_key_alone(
    owner: openai.OpenAI, long_server: Any, store: bool
) -> None:
    stream = owner.responses.create(store=store, **ENDLESS)
    created: Any = next(iter(stream))
    assert created.response.status == "in_progress"
    with openai.OpenAI(base_url=f"{long_server.url}/v1", api_key="sk-two", max_retries=0) as other:
        for ask in (other.responses.cancel, other.responses.retrieve, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                ask(created.response.id)
    if store:
        assert owner.responses.retrieve(created.response.id).status == "in_progress"
        with pytest.raises(openai.BadRequestError):
            owner.responses.create(model="tiny", input="a", previous_response_id=created.response.id)
    cancelled = checked(owner.responses.cancel(created.response.id))
    assert cancelled.status == "cancelled"
    *_, last = stream
    assert last.response.to_dict() == cancelled.to_dict()
    if store:
        assert owner.responses.cancel(created.response.id).to_dict() == cancelled.to_dict()
        assert owner.responses.retrieve(created.response.id).to_dict() == cancelled.to_dict()
    else:
        with pytest.raises(openai.NotFoundError):
            owner.responses.cancel(created.response.id)


@pytest.mark.parametrize("store", [False, True])
def test_a_response_whose_client_leaves_is_cancelled(
    owner: openai.OpenAI, long_server: Any, store: bool
) -> None:
    stream = owner.responses.create(store=store, **ENDLESS)
    created: Any = next(iter(stream))
    stream.close()
    running = long_server.serving.responses.running("one", created.response.id)
    if running is not None:
        long_server.in_loop(running.ended.wait)
    if store:
        left = owner.responses.retrieve(created.response.id)
        assert left.status == "cancelled"
        assert left.usage is not None
        assert left.usage.output_tokens < 3900
    assert not long_server.serving.responses.num_running


def test_a_response_that_runs_is_deleted_and_written_on(owner: openai.OpenAI) -> None:
    asked: Any = {**ENDLESS, "max_output_tokens": 60}
    stream = owner.responses.create(store=True, **asked)
    created: Any = next(iter(stream))
    owner.responses.delete(created.response.id)
    *_, last = stream
    assert last.type == "response.incomplete"
    with pytest.raises(openai.NotFoundError):
        owner.responses.retrieve(created.response.id)
