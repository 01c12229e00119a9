"""Whether a server says truly how it is."""

import json
from collections import Counter
from contextlib import ExitStack

import httpx

from ..engine_gate import comes_true
from .conftest import RunningServer
from .raw import post, raw_client


def test_a_server_whose_engine_has_answered_a_token_is_ready_and_says_so_everywhere(
    client: httpx.Client,
) -> None:
    assert client.get("/health/live").json() == {"status": "live"}
    for path in ("/health", "/health/ready"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.json()["status"] == "ready"
        assert answer.json()["num_steps"] >= 1


def test_health_is_told_while_a_burst_is_begun(server: RunningServer) -> None:
    body = json.dumps({"prompt": "hello " * 10, "max_tokens": 4, "ignore_eos": True}).encode()
    with server.held() as engine, ExitStack() as stack:
        burst = [stack.enter_context(raw_client(server.url)) for _ in range(1280)]
        for client in burst:
            client.send(post("/v1/completions", body))
        for path in ("/health/live", "/health", "/health/ready"):
            assert server.client.get(path).status_code == 200
            assert comes_true(lambda: server.server.lifecycle.num_running > 100)
        engine.open()
        statuses = Counter(client.read().status for client in burst)
        assert set(statuses) <= {200, 429}
        assert statuses[200] >= server.server.config.max_waiting
