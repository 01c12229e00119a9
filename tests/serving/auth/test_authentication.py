"""A real server with keys: nobody gets in without one, by no path, method or spelling."""

import asyncio
import http.client
import socket
import time
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Route

from lamina.serving.auth.authentication import Authentication
from lamina.serving.auth.key import Entry
from lamina.serving.auth.keys import Keys
from lamina.serving.errors import ApiError

KEY, LIMITED, NARROW = "sk-full-of-secrets", "sk-limited", "sk-narrow"
OPEN = "/health/live"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(
        f"""
        [keys.full]
        key = "{KEY}"
        [keys.limited]
        key = "{LIMITED}"
        requests_per_minute = 3
        tokens_per_minute = 60
        [keys.narrow]
        key = "{NARROW}"
        routes = ["/v1/models", "/v1/chat/*"]
        models = ["other"]
        """
    )
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def locked(start_server, key_file):
    """A server with keys, below a root path, whose pages may be read from one origin."""
    return start_server(
        api_key_file=key_file,
        root_path="/proxy",
        open_routes=("/metrics",),
        cors_origins=("https://page.example",),
        page=False,
    )


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def raw(server, target: str, method: str = "GET", headers: dict[str, str] | None = None):
    """Asks for a target as it is written, which no client would send; returns status and body."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
    connection.putrequest(method, target, skip_accept_encoding=True)
    for name, value in {"Content-Length": "0", **(headers or {})}.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    status, body = response.status, response.read()
    connection.close()
    return status, body


def routes_of(server) -> list[tuple[str, str]]:
    routes = [route for route in server.server.app.routes if isinstance(route, Route)]
    return [(method, route.path) for route in routes for method in sorted(route.methods or ())]


def test_every_route_asks_for_a_key_but_liveness_and_what_is_opened(locked):
    routes = routes_of(locked)
    assert len(routes) > 10
    for method, path in routes:
        target = path.replace("{id:path}", "tiny").replace("{id}", "tiny")
        status = locked.client.request(method, target).status_code
        is_open = method in ("GET", "HEAD") and path in (OPEN, "/metrics")
        assert (status != 401) == is_open, (method, path, status)


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/nothing",
        "//v1/models",
        "/v1//models",
        "/V1/MODELS",
        "/v1/models/",
        "/v1%2Fmodels",
        "/%76%31/models",
        "/v1/models?x=1",
        "/v1/models;x",
        "/v1/models#/health/live",
        "/health/live/",
        "/health/live/..",
        "/health/live/../../v1/models",
        "/health/live%2F..%2F..%2Fv1%2Fmodels",
        "//health/live",
        "/HEALTH/LIVE",
        "/health/live%00",
        "/health/live;/v1/models",
        "/health%2Flive/",
        "/proxy/v1/models",
        "/proxy//v1/models",
        "/proxy/proxy/v1/models",
        "/proxy/proxy/health/live",
        "/proxyhealth/live",
        "/proxy",
        "/proxy?x=1",
        "/proxy/",
        "/metrics/",
        "/proxy/proxy/metrics",
        "http://localhost/v1/models",
        "http://localhost/health/live/x",
        "*",
    ],
)
def test_no_spelling_of_a_path_gets_around_the_key(locked, target):
    status, body = raw(locked, target)
    assert status in (400, 401), (status, body)
    if status == 401:
        assert b'"type":"authentication_error"' in body


@given(
    st.lists(
        st.sampled_from(
            [
                "/",
                "//",
                "..",
                ".",
                "%2f",
                "%2F",
                "%2e",
                "health",
                "live",
                "metrics",
                "v1",
                "models",
                "proxy",
                ";",
                "?",
            ]
        ),
        max_size=8,
    )
)
def test_whatever_the_path_only_what_is_open_is_answered(locked, pieces):
    target = "/" + "".join(pieces)
    status, body = raw(locked, target)
    if status != 401:
        path = target.partition("?")[0].replace("%2f", "/").replace("%2F", "/").replace("%2e", ".")
        assert path.removeprefix("/proxy") in (OPEN, "/metrics"), (status, target, body)


def test_below_the_root_path_a_key_is_asked_for_alike(locked):
    for prefix in ("", "/proxy"):
        assert raw(locked, f"{prefix}/health/live")[0] == 200
        assert raw(locked, f"{prefix}/v1/models")[0] == 401
        assert raw(locked, f"{prefix}/v1/models", headers=bearer(KEY))[0] == 200
        assert raw(locked, f"{prefix}/health/live", "POST")[0] == 401


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY),
        {"Authorization": f"bearer  {KEY}"},
        {"x-api-key": KEY},
        {"x-api-key": KEY, "Authorization": "Basic abc"},
        {"x-api-key": "wrong", "Authorization": f"Bearer {KEY}"},
        {"x-api-key": KEY, "Authorization": "Bearer wrong"},
    ],
)
def test_clients_of_both_kinds_get_in(locked, headers):
    assert locked.client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": KEY},
        {"Authorization": "Bearer"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": f"Token {KEY}"},
        bearer("wrong"),
        bearer(KEY.upper()),
        bearer(KEY + "x"),
        bearer(KEY[:-1]),
        bearer(f"{KEY},{KEY}"),
        {"x-api-key": ""},
        {"x-api-key": f"Bearer {KEY}"},
        {"api-key": KEY},
        {"Cookie": f"key={KEY}"},
        {"x-api-key": "é".encode()},
    ],
)
def test_a_wrong_key_is_answered_401_in_openais_shape(locked, headers):
    response = locked.client.get("/v1/models", headers=headers)
    assert response.status_code == 401
    error = response.json()["error"]
    assert error["type"] == "authentication_error"
    assert error["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"].startswith("Bearer ")
    assert response.headers["x-request-id"]
    assert KEY not in response.text
    assert "wrong" not in response.text


def test_a_key_in_the_address_is_none(locked):
    assert locked.client.get(f"/v1/models?api_key={KEY}&key={KEY}").status_code == 401


def test_a_preflight_needs_no_key_and_refusals_can_be_read_by_the_page(locked):
    origin = {"Origin": "https://page.example"}
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = locked.client.options("/v1/chat/completions", headers={**origin, **asked})
    assert preflight.status_code in (200, 204)
    refused = locked.client.post("/v1/chat/completions", headers=origin, json={})
    assert refused.status_code == 401
    for response in (preflight, refused):
        assert response.headers["access-control-allow-origin"] == "https://page.example"


def test_a_key_may_use_its_routes_and_models_alone(locked):
    client, headers = locked.client, bearer(NARROW)
    models = client.get("/v1/models", headers=headers)
    assert (models.status_code, models.json()["data"]) == (200, [])
    for path in ("/version", "/v1/models/tiny", "/v1/completions", "/nothing"):
        response = client.get(path, headers=headers)
        assert response.status_code == 403, path
        assert response.json()["error"]["code"] == "route_not_allowed"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    response = client.post("/v1/chat/completions", headers=headers, json=body)
    assert response.status_code == 403
    assert response.json()["error"]["param"] == "model"


def test_limits_are_told_on_every_answer_and_the_one_too_many_is_refused(locked, monkeypatch):
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
    now = time.monotonic()
    for key in locked.serving.keys._keys:
        monkeypatch.setattr(key.meter, "_clock", lambda: now)  # nothing is given back meanwhile
    responses = [locked.client.post("/v1/completions", headers=bearer(LIMITED), json=body) for _ in range(4)]
    assert [response.status_code for response in responses] == [200, 200, 200, 429]
    told = [response.headers["x-ratelimit-remaining-requests"] for response in responses]
    assert told == ["2", "1", "0", "0"]
    assert int(responses[1].headers["x-ratelimit-remaining-tokens"]) <= 60 - 7
    assert responses[0].headers["x-ratelimit-limit-tokens"] == "60"
    refused = responses[3]
    assert int(refused.headers["retry-after"]) == 20
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert refused.headers.get_list("x-ratelimit-limit-requests") == ["3"]


def test_openais_client_reads_what_is_wrong(locked):
    openai = pytest.importorskip("openai")

    def models(key: str):
        with openai.OpenAI(api_key=key, base_url=f"{locked.url}/v1", max_retries=0) as client:
            return client.models.list()

    assert models(KEY).data[0].id == "tiny"
    with pytest.raises(openai.AuthenticationError):
        models("wrong")


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://localhost:3000", 200),
        ("http://127.0.0.1", 200),
        ("http://[::1]:8000", 200),
        ("https://evil.example", 403),
        ("http://localhost.evil.example", 403),
        ("http://127.0.0.1.nip.io", 403),
        ("http://[::1", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_without_keys_no_page_of_the_web_asks_through_a_users_browser(server, origin, status):
    headers = {} if origin is None else {"Origin": origin}
    # A body without a type is sent by any page without asking first.
    body = b'{"model": "tiny", "prompt": [5, 6], "max_tokens": 1}'
    answer = server.client.post("/v1/completions", headers=headers, content=body)
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "origin_not_allowed"


def test_what_is_read_without_a_key_is_read_by_anonymous_and_cannot_be_written():
    async def app(scope, receive, send):
        owners.append(scope["lamina.key"].name)

    async def ask(method: str) -> None:
        scope = {"type": "http", "method": method, "path": "/v1/models", "headers": []}
        await Authentication(app, keys, open_routes=("/v1/models",))(scope, None, None)

    owners, keys = [], Keys([Entry(name="a", digest=b"")])
    for method in ("GET", "HEAD", "OPTIONS"):
        asyncio.run(ask(method))
    assert owners == ["anonymous"] * 3
    for method in ("POST", "DELETE", "get"):
        with pytest.raises(ApiError) as caught:
            asyncio.run(ask(method))
        assert caught.value.status == 401


def test_a_websocket_is_refused(locked):
    address = urlsplit(locked.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")
