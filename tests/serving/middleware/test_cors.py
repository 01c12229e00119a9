"""Whom browsers let read what."""

from collections.abc import Callable

import httpx
import pytest

from lamina.common.errors import ConfigError
from lamina.serving.config import ServeConfig
from lamina.serving.streaming.handlers import NOT_ENFORCED

from ..conftest import RunningServer

PAGE = "https://page.example"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
ASKED = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-os",
}


@pytest.fixture(scope="module")
def guarded(start_server: Callable[..., RunningServer]) -> httpx.Client:
    """A server with a key, which lets one page in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAMINA_API_KEY", "secret")
        return start_server(cors_origins=[PAGE], cors_credentials=True).client


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/nowhere", "/health/live"])
def test_a_preflight_needs_no_key(guarded: httpx.Client, path: str) -> None:
    answer = guarded.options(path, headers=ASKED)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert "POST" in answer.headers["access-control-allow-methods"]
    allowed = answer.headers["access-control-allow-headers"].lower().split(", ")
    assert {"authorization", "content-type", "x-stainless-os"} <= set(allowed)


def test_a_page_may_use_every_method_of_every_route(server: RunningServer, guarded: httpx.Client) -> None:
    answer = guarded.options("/v1/models", headers=ASKED)
    served = {method for route in server.server.app.routes for method in getattr(route, "methods", ())}
    assert "DELETE" in served
    assert served <= set(answer.headers["access-control-allow-methods"].split(", "))
    assert served <= set(answer.headers["allow"].split(", "))


def test_a_page_may_read_what_a_header_says_of_its_request(guarded: httpx.Client) -> None:
    answer = guarded.get("/v1/models", headers={"authorization": "Bearer secret", "origin": PAGE})
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {NOT_ENFORCED, "X-Lamina-Ignored-Fields", "X-Request-Id", "Retry-After"} <= {*exposed}


@pytest.mark.parametrize(
    "key, path, body, status",
    [
        ("secret", "/v1/chat/completions", CHAT, 200),
        ("secret", "/v1/chat/completions", {**CHAT, "stream": True}, 200),
        ("secret", "/v1/chat/completions", {}, 400),
        ("secret", "/nowhere", {}, 404),
        ("secret", "/version", {}, 405),
        ("wrong", "/v1/chat/completions", CHAT, 401),
        ("wrong", "/nowhere", {}, 401),
    ],
)
def test_every_answer_may_be_read_by_the_page_and_by_no_other(
    guarded: httpx.Client, key: str, path: str, body: dict[str, object], status: int
) -> None:
    headers = {"authorization": f"Bearer {key}", "origin": PAGE}
    answer = guarded.post(path, json=body, headers=headers)
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["vary"] == "Origin"
    assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    other = guarded.post(path, json=body, headers={**headers, "origin": "https://other.example"})
    assert other.status_code == status
    assert "access-control-allow-origin" not in other.headers
    assert other.headers["vary"] == "Origin"


def test_any_page_may_read_where_any_is_admitted_but_without_credentials(
    start_server: Callable[..., RunningServer],
) -> None:
    answer = start_server(cors_origins=["*"]).client.get("/version", headers={"origin": "null"})
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in answer.headers


def test_no_page_is_admitted_unless_named(client: httpx.Client) -> None:
    answer = client.options("/v1/models", headers=ASKED)
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_any_origin_with_credentials_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="cors_origins holds \\* and cors_credentials is True"):
        ServeConfig(model_names=("tiny",), cors_origins=("*",), cors_credentials=True)


@pytest.mark.parametrize(
    "origin", ["page.example", "https://", "https://a/b", "https://*.example", "", "nü://x"]
)
def test_what_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins"):
        ServeConfig(model_names=("tiny",), cors_origins=(origin,))
