"""GET /v1/models: every name is told, and found again by it."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from lamina.serving.config import ServeConfig
from lamina.serving.context import Serving, serving_of
from lamina.serving.errors import ApiError
from lamina.serving.routes.models import model_entry
from lamina.serving.served_models import ServedModels
from lamina.serving.streaming.handlers import chosen_model


@pytest.fixture
def serving() -> Serving:
    names = ("org/tiny", "tiny")
    held = SimpleNamespace(max_model_len=256, tasks=("generate",), adapters={})
    loaded = SimpleNamespace(runtime=SimpleNamespace(input=held))
    others = dict.fromkeys(
        ("keys", "lifecycle", "metrics", "metrics_page", "request_log", "tracing", "responses")
    )
    return Serving(config=ServeConfig(model_names=names), loaded=loaded, **others)


def asking(serving: Serving) -> Any:
    """A request of a server with one model."""
    state = SimpleNamespace(models=ServedModels([serving]))
    return SimpleNamespace(app=SimpleNamespace(state=state), scope={})


def test_an_answer_carries_the_name_that_was_asked_by(serving: Serving) -> None:
    models, request = ServedModels([serving]), asking(serving)
    assert asyncio.run(chosen_model(request, "tiny")) == "tiny"
    assert asyncio.run(chosen_model(request, "org/tiny")) == "org/tiny"
    assert asyncio.run(chosen_model(request, None)) == "org/tiny"
    assert models.find(None) is models.find("tiny") is serving_of(request) is serving


@pytest.mark.parametrize("name", ["", "Tiny", "tiny ", "org", "x" * 10**6])
def test_another_name_is_not_found(serving: Serving, name: str) -> None:
    with pytest.raises(ApiError) as caught:
        ServedModels([serving]).find(name)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert "org/tiny" in caught.value.message
    assert len(caught.value.body()) < 1000


def test_an_entry_tells_the_context_and_the_root(serving: Serving) -> None:
    entry = model_entry(serving, "tiny")
    assert entry["id"] == "tiny"
    assert entry["root"] == "org/tiny"
    assert entry["max_model_len"] == 256
    assert entry["tasks"] == ("generate",)
    assert entry["object"] == "model"
    assert isinstance(entry["created"], int)


def test_every_name_is_listed_and_found_again(start_server: Callable[..., Any]) -> None:
    running = start_server(model_names=("org/tiny", "tiny"))
    listed = running.client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [entry["id"] for entry in listed["data"]] == ["org/tiny", "tiny"]
    for entry in listed["data"]:
        for id_ in (entry["id"], quote(entry["id"], safe="")):
            assert running.client.get(f"/v1/models/{id_}").json() == entry
    for id_ in ("org", "org/", "another", "%2e%2e/%2e%2e/etc/passwd", "tiny%00"):
        answer = running.client.get(f"/v1/models/{id_}")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
    for asked in ("org/tiny", "tiny", None):
        body = {"model": asked, "prompt": "a", "max_tokens": 1}
        assert running.client.post("/v1/completions", json=body).json()["model"] == (asked or "org/tiny")
    running.close()
