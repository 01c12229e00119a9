"""After thousands of hostile clients a server holds nothing more than before, and still serves."""

import asyncio
import gc
import os
import re
import socket
import time
from urllib.parse import urlsplit

import pytest

from ..engine_gate import comes_true
from .hostile_clients import Attack

SECRETS = {"free": "sk-free", "few": "sk-few", "rare": "sk-rare"}
PATIENCE = 30.0  # seconds until a server has let go of everything


@pytest.fixture(scope="module")
def attacked(start_server, tmp_path_factory):
    """A server with little room, little patience, and keys with and without limits."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(
        f"""
        [keys.free]
        key = "{SECRETS["free"]}"
        [keys.few]
        key = "{SECRETS["few"]}"
        max_concurrent = 16
        tokens_per_minute = 100000
        [keys.rare]
        key = "{SECRETS["rare"]}"
        requests_per_minute = 2000
        priority = 1
        """
    )
    path.chmod(0o600)
    return start_server(
        api_key_file=path,
        settings={"max_num_seqs": 8, "num_kv_blocks": 128},
        max_waiting=64,
        header_timeout=1,
        body_timeout=1,
        send_timeout=1,
        max_unsent_bytes=65536,
        keep_alive_timeout=1,
        max_logprobs=20,
    )


def held(server) -> dict[str, object]:
    """What a server holds while it serves nobody."""

    async def look() -> dict[str, object]:
        stats = await server.serving.runtime.stats()
        books, client = server.serving.admission, server.serving.runtime._client
        return {
            "tasks": len(asyncio.all_tasks()) - 1,  # but this one
            "files": len(os.listdir("/proc/self/fd")),
            "requests": (stats["requests"]["running"], stats["requests"]["waiting"]),
            "blocks": stats["blocks"]["used"],
            "admitted": (books.num_admitted, books.num_waiting, len(books._held), len(books._by_request)),
            "keys": [key.meter.num_running for key in server.serving.keys._keys],
            "responses": (server.serving.lifecycle.num_running, server.serving.responses.num_running),
            "answers": (len(client._live), len(client._asked), len(server.serving.metrics._live)),
        }

    return server.in_loop(look)


def series(server) -> set[str]:
    """The names and labels of all figures."""
    page = server.client.get("/metrics", headers={"x-api-key": SECRETS["free"]})
    assert page.status_code == 200
    return {line.rpartition(" ")[0] for line in page.text.splitlines() if not line.startswith("#")}


def resident() -> int:
    """Bytes of memory of the process, once what is garbage has been collected."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def attack(server, num_requests: int, seed: int) -> Attack:
    attack = Attack(server.url, list(SECRETS.values()), seed=seed)
    asyncio.run(attack.run(num_requests, at_once=64))
    return attack


def check_nothing_is_left(server, num_requests: int) -> None:
    attack(server, 150, seed=1)  # each kind of figure has been told once, each thread started
    before, known = settled(server), series(server)
    num_bytes = resident()
    done = attack(server, num_requests, seed=2)
    assert set(done.statuses) <= {0, 200, 400, 401, 404, 408, 429, 431, 499}, done.statuses
    assert done.statuses[200] > num_requests / 10, done.statuses
    assert min(done.ways.values()) > num_requests / 400
    after = settled(server, before)
    assert after == {**before, "files": min(before["files"], after["files"])}, before
    routes = {route.path for route in server.server.app.routes} | {"unmatched"}
    for name in series(server) - known:
        found = re.fullmatch(
            r'lamina:http_requests_total{model_name="tiny",route="(.+)",status="\d{3}"}', name
        )
        assert found, name
        assert found[1] in routes, name
    assert resident() - num_bytes < 64 << 20
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}
    answer = server.client.post("/v1/completions", json=body, headers={"x-api-key": SECRETS["free"]})
    assert answer.json()["usage"]["completion_tokens"] == 3


def settled(server, wanted: dict[str, object] | None = None) -> dict[str, object]:
    """What is held once that is no more than wanted, or once nothing changes."""
    gc.collect()  # closes what tests before have left open
    server.client.close()
    server.client = type(server.client)(base_url=server.url, timeout=60)
    deadline, last = time.monotonic() + PATIENCE, held(server)
    while time.monotonic() < deadline:
        time.sleep(2.0 if wanted is None else 0.2)
        now = held(server)
        if now == (last if wanted is None else wanted):
            return now
        last = now
    return last


def test_a_connection_whose_client_never_reads_its_whole_answer_is_dropped(attacked):
    before = settled(attacked)
    address = urlsplit(attacked.url)
    asked = f"GET /openapi.json HTTP/1.1\r\nHost: x\r\nx-api-key: {SECRETS['free']}\r\n\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=30) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(asked.encode() * 400)  # the answers are more than sockets hold
        assert client.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200"
        assert comes_true(lambda: not attacked.is_connected(client))
        del before["files"]  # others come and go
        assert comes_true(lambda: held(attacked).items() >= before.items())


@pytest.mark.long
def test_hostile_clients_leave_nothing_behind(attacked):
    check_nothing_is_left(attacked, 500)


@pytest.mark.slow
def test_ten_thousand_hostile_clients_leave_nothing_behind(attacked):
    check_nothing_is_left(attacked, 10_000)
