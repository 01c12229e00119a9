"""Every answer has its headers and every error the one shape, whatever layer refuses."""

import json
from collections.abc import Callable

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..conftest import RunningServer
from ..raw import raw_client

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def error_of(answer: httpx.Response) -> dict[str, object]:
    """The error of an answer, which has every part of one."""
    error: dict[str, object] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    "method, path, options, status, kind",
    [
        ("GET", "/nowhere", {}, 404, "not_found_error"),
        ("GET", "/v1", {}, 404, "not_found_error"),
        ("GET", "/version/", {}, 404, "not_found_error"),
        ("GET", "/VERSION", {}, 404, "not_found_error"),
        ("GET", "/%2e%2e/etc/passwd", {}, 404, "not_found_error"),
        ("GET", "/v1/models/nothing", {}, 404, "not_found_error"),
        ("POST", "/version", {}, 405, "method_not_allowed"),
        ("GET", "/v1/chat/completions", {}, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", {}, 405, "method_not_allowed"),
        ("POST", "/v1/chat/completions", {"content": b""}, 400, "invalid_request_error"),
        ("POST", "/v1/chat/completions", {"content": b"[]"}, 400, "invalid_request_error"),
        ("POST", "/v1/chat/completions", {"content": b"null"}, 400, "invalid_request_error"),
        ("POST", "/v1/chat/completions", {"content": b"\xff{}"}, 400, "invalid_request_error"),
        ("POST", "/v1/chat/completions", {"content": b"{" * 100_000}, 400, "invalid_request_error"),
        ("POST", "/v1/chat/completions", {"json": {**CHAT, "n": -1}}, 400, "invalid_request_error"),
        ("POST", "/v1/chat/completions", {"json": {**CHAT, "model": "gpt"}}, 404, "not_found_error"),
        ("POST", "/v1/chat/completions", {"data": {"a": "b"}}, 415, "unsupported_media_type"),
        (
            "POST",
            "/v1/chat/completions",
            {"content": b"{}", "headers": {"content-type": "text/plain"}},
            415,
            "unsupported_media_type",
        ),
        (
            "POST",
            "/v1/chat/completions",
            {"content": b"{}", "headers": {"content-type": "application/json; charset=latin-1"}},
            415,
            "unsupported_media_type",
        ),
        (
            "POST",
            "/v1/chat/completions",
            {"content": b"{}", "headers": {"content-type": "application/json; q=1; charset=latin-1; p=2"}},
            415,
            "unsupported_media_type",
        ),
        (
            "POST",
            "/v1/chat/completions",
            {"content": b"{}", "headers": {"content-encoding": "gzip"}},
            415,
            "unsupported_media_type",
        ),
    ],
)
def test_what_is_refused_is_refused_in_the_one_shape(
    client: httpx.Client, method: str, path: str, options: dict[str, object], status: int, kind: str
) -> None:
    answer = client.request(method, path, **options)  # type: ignore[arg-type]
    assert answer.status_code == status
    assert error_of(answer)["type"] == kind
    if status == 405:
        assert answer.headers["allow"]


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "application/json; charset=UTF-8",
        "application/problem+json",
        "application/json; charset=utf-8; profile=x",
        'application/json;q=1;Charset="utf-8" ;xcharset=latin-1',
    ],
)
def test_json_is_taken_under_each_of_its_names(client: httpx.Client, kind: str | None) -> None:
    request = client.build_request("POST", "/v1/chat/completions", content=json.dumps(CHAT))
    if kind is not None:
        request.headers["content-type"] = kind
    assert client.send(request).status_code == 200


def test_what_nobody_expected_is_a_500_that_tells_nothing_and_a_log_that_tells_all(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(request: Request) -> Response:
        raise RuntimeError("a secret of the server")

    routes, own = server.server.app.router.routes, Route("/fails", fail)

    async def add() -> None:
        routes.append(own)

    async def remove() -> None:
        routes.remove(own)

    server.in_loop(add)
    answer = server.client.get("/fails", headers={"x-request-id": "find-me"})
    server.in_loop(remove)
    assert answer.status_code == 500
    assert error_of(answer)["type"] == "server_error"
    assert "secret" not in answer.text
    assert "find-me" in caplog.text
    assert "a secret of the server" in caplog.text
    assert server.client.get("/version").status_code == 200


def test_two_requests_of_one_id_are_both_served_and_told_it(client: httpx.Client) -> None:
    headers = {"x-request-id": "mine"}
    for _ in range(2):
        answer = client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == "mine"
    stream = client.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers)
    assert stream.headers["x-request-id"] == "mine"


def test_requests_without_an_id_get_one_each(client: httpx.Client) -> None:
    ids = {client.get(path).headers["x-request-id"] for path in ("/version", "/nowhere", "/health/live")}
    assert len(ids) == 3


@settings(max_examples=60)
@given(given_id=st.binary(max_size=300).filter(lambda text: not set(text) & set(b"\r\n\0")))
def test_an_id_comes_back_printable_and_no_longer_than_128(server: RunningServer, given_id: bytes) -> None:
    with raw_client(server.url) as client:
        client.send(b"GET /version HTTP/1.1\r\nhost: t\r\nx-request-id: " + given_id + b"\r\n\r\n")
        answer = client.read()
        if answer.status == 400:  # no header may hold that
            return
        told = answer.headers["x-request-id"]
        assert 1 <= len(told) <= 128
        assert told.isascii()
        assert told.isprintable()
        kept = bytes(byte for byte in given_id.strip(b" \t")[:128] if 32 < byte < 127)
        assert not kept or told.encode() == kept


@pytest.mark.parametrize("path", ["/version", "/health", "/v1/models", "/nowhere"])
def test_head_is_get_without_the_body(server: RunningServer, path: str) -> None:
    with raw_client(server.url) as client:
        answers = []
        for method in ("GET", "HEAD"):
            client.send(f"{method} {path} HTTP/1.1\r\nhost: t\r\nx-request-id: same\r\n\r\n".encode())
            answers.append(client.read(has_body=method == "GET"))
        get, head = answers
        assert head.status == get.status
        if path != "/health":  # whose steps are counted on
            assert int(head.headers["content-length"]) == len(get.body)
        assert head.headers.keys() == get.headers.keys()


def test_a_slash_too_many_is_an_unknown_path(server: RunningServer) -> None:
    with raw_client(server.url) as client:
        for path in (b"//version", b"/v1//models", b"/version//"):
            client.send(b"GET " + path + b" HTTP/1.1\r\nhost: t\r\n\r\n")
            answer = client.read()
            assert answer.status == 404
            assert answer.error["type"] == "not_found_error"


def test_a_proxy_may_strip_the_root_path_or_leave_it(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(root_path="/lamina")
    with httpx.Client(base_url=server.url.removesuffix("/lamina"), timeout=60) as client:
        for path in ("/version", "/v1/models", "/health/live"):
            assert client.get(path).status_code == 200
            assert client.get(f"/lamina{path}").status_code == 200
        for path in ("/laminaversion", "/lamina/lamina/version"):
            assert client.get(path).status_code == 404
        assert client.post("/lamina/v1/chat/completions", json=CHAT).status_code == 200
