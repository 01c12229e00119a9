"""Adapters over HTTP: loaded, listed and asked for as models, and unloaded while they answer."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina.common.errors import ConfigError
from lamina.serving.config import ServeConfig

from ...adapters import write_adapter
from ..conftest import RunningServer

StartServer = Callable[..., RunningServer]
PROMPT = [5, 9, 30, 7]


@pytest.fixture(scope="session")
def two_adapters(tiny_text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("adapters")
    return [str(write_adapter(tiny_text_folder, root / f"a{seed}", seed=seed)) for seed in range(2)]


@pytest.fixture
def server(start_server: StartServer, two_adapters: list[str]) -> Iterator[RunningServer]:
    made = start_server(
        settings={"lora": "2:8"}, lora_updates=True, lora_modules=(f"first={two_adapters[0]}",)
    )
    yield made
    made.close()


def completion(server: RunningServer, model: str | None, **more: Any) -> Any:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}
    return server.client.post("/v1/completions", json=body)


def text(server: RunningServer, model: str | None) -> str:
    answer = completion(server, model, return_token_ids=True)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == (model or "tiny")
    return str(answer.json()["choices"][0]["token_ids"])


def load(server: RunningServer, name: str, path: str) -> Any:
    return server.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})


def unload(server: RunningServer, name: str) -> Any:
    return server.client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def names(server: RunningServer) -> list[str]:
    return [entry["id"] for entry in server.client.get("/v1/models").json()["data"]]


def test_adapters_are_models_that_come_and_go(server: RunningServer, two_adapters: list[str]) -> None:
    own, first = text(server, None), text(server, "first")
    assert names(server) == ["tiny", "first"]
    answer = load(server, "second", two_adapters[1])
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'second' added successfully.")
    assert load(server, "second", two_adapters[1]).status_code == 200
    entry = server.client.get("/v1/models/second").json()
    assert (entry["root"], entry["parent"]) == (two_adapters[1], "tiny")
    assert len({own, first, text(server, "second")}) == 3
    assert unload(server, "first").status_code == 200
    assert names(server) == ["tiny", "second"]
    refused = completion(server, "first")
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "wanted one of tiny, or an adapter" in error["message"]
    assert text(server, None) == own
    assert load(server, "first", two_adapters[0]).status_code == 200
    assert text(server, "first") == first


def test_chats_messages_and_responses_have_it_too(server: RunningServer) -> None:
    def said(path: str, model: str) -> str:
        body: dict[str, Any] = {"model": model, "temperature": 0}
        if path == "/v1/responses":
            body |= {"input": "hello", "max_output_tokens": 16}
        else:
            body |= {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}
        answer = server.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["model"] == model
        return str(found.get("choices") or found.get("content") or found.get("output"))

    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
        assert said(path, "first") != said(path, "tiny")


def test_what_cannot_be_loaded_is_refused_with_the_field(
    server: RunningServer, two_adapters: list[str], tmp_path: Path
) -> None:
    for name, path, status, param in [
        ("tiny", two_adapters[1], 400, "lora_name"),
        ("first", two_adapters[1], 400, None),
        ("none", str(tmp_path / "nowhere"), 400, "lora_path"),
        ("", two_adapters[1], 400, "lora_name"),
    ]:
        answer = load(server, name, path)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert unload(server, "unheard").status_code == 404
    inplace = {"lora_name": "first", "lora_path": two_adapters[1], "load_inplace": True}
    assert server.client.post("/v1/load_lora_adapter", json=inplace).status_code == 400
    assert names(server) == ["tiny", "first"]


def test_clients_may_load_none_unless_the_server_says_so(
    start_server: StartServer, two_adapters: list[str]
) -> None:
    server = start_server(settings={"lora": "1:8"})
    for answer in (load(server, "a", two_adapters[0]), unload(server, "a")):
        assert answer.status_code == 403
        assert "--lora-updates" in answer.json()["error"]["message"]
    server.close()


def test_a_stream_goes_on_while_its_adapter_is_unloaded(server: RunningServer) -> None:
    wanted = completion(server, "first", max_tokens=40).json()["choices"][0]["text"]
    body = {"model": "first", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        lines = answer.iter_lines()
        got = [next(lines)]
        assert unload(server, "first").status_code == 200
        got += list(lines)
    pieces = [json.loads(line[6:]) for line in got if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"]) == wanted


@pytest.mark.parametrize("wrong", ["a", "=b", "a=", "tiny=b"])
def test_modules_are_names_and_folders(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"lora_modules holds .*; wanted NAME=FOLDER"):
        ServeConfig(model_names=("tiny",), lora_modules=(wrong,))
    with pytest.raises(ConfigError, match="of a name that is no other's"):
        ServeConfig(model_names=("tiny",), lora_modules=("a=b", "a=c"))
