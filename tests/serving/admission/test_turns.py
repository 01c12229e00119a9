"""A real server with little room: keys take turns, who goes leaves the queue, refusals say when to come."""

import concurrent.futures
import threading

import httpx
import pytest

from ...engine_gate import comes_true
from ..raw import post, raw_client

SECRETS = {"many": "sk-many", "one": "sk-one", "late": "sk-late"}


@pytest.fixture(scope="module")
def narrow(start_server, tmp_path_factory):
    """A server that computes one answer at a time."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    priority = {"late": 1}
    path.write_text(
        "".join(
            f'[keys.{name}]\nkey = "{secret}"\npriority = {priority.get(name, 0)}\n'
            for name, secret in SECRETS.items()
        )
    )
    path.chmod(0o600)
    return start_server(api_key_file=path, settings={"max_num_seqs": 1}, max_waiting=40)


def ask(server, owner: str, max_tokens: int = 60, **more):
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True}
    body["request_id"] = owner
    headers = {"x-api-key": SECRETS[owner], **more}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


def queue(server) -> int:
    async def look():
        return server.serving.admission.num_waiting

    return server.in_loop(look)


def wait_for(server, num_waiting: int) -> None:
    assert comes_true(lambda: queue(server) == num_waiting), queue(server)


@pytest.fixture
def busy(narrow):
    """The engine has all that it may be given, and stands until let_go() gives that up, or the test ends."""

    def keep_busy() -> None:
        body = {"model": "tiny", "prompt": [5], "max_tokens": 200, "ignore_eos": True, "n": 64}
        headers = {"x-api-key": SECRETS["many"]}
        given = {"json": body | {"stream": True}, "headers": headers, "timeout": 60}
        with httpx.stream("POST", f"{narrow.url}/v1/completions", **given):
            assert leave.wait(120)

    def let_go() -> None:
        leave.set()
        thread.join(60)
        engine.open()

    leave, narrow.let_go = threading.Event(), let_go
    thread = threading.Thread(target=keep_busy)
    with narrow.held() as engine:
        thread.start()
        engine.begin(64)
        yield narrow
        leave.set()
        thread.join(60)
    narrow.comes_to_rest()


def test_one_request_of_another_key_overtakes_a_flood(busy):
    done: list[str] = []

    class Ends:
        """Hears of answers in the order in which they end, which that of their clients need not be."""

        def outputs(self, outputs, now):
            pass

        def finished(self, request):
            if (owner := request.request_id.split("-")[1]) in SECRETS:
                done.append(owner)

    async def listen() -> None:
        busy.serving.runtime.listen(Ends())

    def enter(owner: str) -> None:
        assert ask(busy, owner, 2).status_code == 200

    busy.in_loop(listen)
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        flood = [pool.submit(enter, "many") for _ in range(20)]
        wait_for(busy, 20)
        late = pool.submit(enter, "late")
        wait_for(busy, 21)
        one = pool.submit(enter, "one")
        wait_for(busy, 22)
        busy.let_go()
        for task in (*flood, one, late):
            task.result(60)
    assert done.index("one") <= 1
    assert done.index("late") == 21


def test_who_goes_away_while_waiting_leaves_the_queue(busy):
    body = b'{"model": "tiny", "prompt": [5], "max_tokens": 2}'
    with raw_client(busy.url) as client:
        client.send(post("/v1/completions", body, f"x-api-key: {SECRETS['one']}"))
        wait_for(busy, 1)
    wait_for(busy, 0)


def test_who_gives_too_little_time_is_told_when_to_come_back(busy):
    answer = ask(busy, "one", **{"x-request-timeout": "0.05"})
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "queue_full"
    assert int(answer.headers["retry-after"]) >= 1
    assert queue(busy) == 0


def test_a_key_cannot_take_the_whole_queue(busy):
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        flood = [pool.submit(ask, busy, "many", 1) for _ in range(50)]
        wait_for(busy, 20)
        refused = next(concurrent.futures.as_completed(flood)).result()
        assert refused.status_code == 429
        assert "of this key" in refused.json()["error"]["message"]
        one = pool.submit(ask, busy, "one", 1)
        wait_for(busy, 21)
        assert comes_true(lambda: sum(task.done() for task in flood) == 30)
        busy.let_go()
        assert one.result(60).status_code == 200
        assert sorted(task.result(60).status_code for task in flood) == [200] * 20 + [429] * 30
