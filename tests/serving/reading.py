"""Streams as a client reads them: events decoded, and put together again."""

import json
from dataclasses import dataclass, field

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def events_of(data):
    """Each event of a stream, decoded; "[DONE]" and comments as text. A stream holds nothing else."""
    assert data.isascii()
    *parts, rest = data.decode().split("\n\n")
    assert rest == ""
    assert all(len(part.splitlines()) == 1 for part in parts)
    return [_event(part) for part in parts]


def _event(part):
    if part.startswith(":"):
        return part
    assert part.startswith("data: ")
    return "[DONE]" if part == "data: [DONE]" else json.loads(part[6:], parse_constant=_refuse)


def _refuse(name):
    raise ValueError(f"{name} is no JSON")


@dataclass
class Choice:
    """What the chunks of one index come to."""

    text: str = ""
    token_ids: list = field(default_factory=list)
    logprobs: dict = field(default_factory=dict)  # each list of the format, joined
    reasons: list = field(default_factory=list)
    stop_reason: object = None
    roles: list = field(default_factory=list)


def choices_of(events):
    """The choices of a stream that ends well, by index; checks what holds of every stream."""
    assert events[-1] == "[DONE]"
    chunks = [event for event in events[:-1] if not isinstance(event, str)]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    choices = {}
    for chunk in chunks:
        assert "error" not in chunk
        for told in chunk["choices"]:
            assert "finish_reason" in told
            choice = choices.setdefault(told["index"], Choice())
            assert not choice.reasons, "a chunk after the last of its choice"
            _add(choice, told)
    assert all(len(choice.reasons) == 1 for choice in choices.values())
    return choices


def _add(choice, told):
    delta = told.get("delta", told)
    piece = delta.get("text", delta.get("content", ""))
    choice.text += piece
    choice.roles += [delta["role"]] if "role" in delta else []
    choice.token_ids += told.get("token_ids", [])
    for name, values in (told["logprobs"] or {}).items():
        choice.logprobs.setdefault(name, []).extend(values)
    if told["finish_reason"] is not None:
        assert piece == "", "the last chunk has text"
        choice.reasons.append(told["finish_reason"])
        choice.stop_reason = told["stop_reason"]


def streamed(client, path, **body):
    """The events of an answer that is streamed."""
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events_of(response.content)


def whole(client, path, **body):
    """An answer as a whole."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return json.loads(response.content, parse_constant=_refuse)
