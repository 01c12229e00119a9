"""A real server with little room: keys take turns, who goes leaves the queue, refusals say when to come."""

import concurrent.futures
import threading
import time

import httpx
import pytest

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
    headers = {"x-api-key": SECRETS[owner], **more}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


def queue(server) -> int:
    async def look():
        return server.serving.admission.num_waiting

    return server.in_loop(look)


def wait_for(server, num_waiting: int) -> None:
    deadline = time.monotonic() + 60
    while queue(server) != num_waiting:
        assert time.monotonic() < deadline, queue(server)
        time.sleep(0.002)


@pytest.fixture
def busy(narrow):
    """The engine has all that it may be given until `leave` is set; then, or at the end, that is given up."""

    def keep_busy() -> None:
        body = {
            "model": "tiny",
            "prompt": [5],
            "max_tokens": 200,
            "ignore_eos": True,
            "n": 64,
            "stream": True,
        }
        headers = {"x-api-key": SECRETS["many"]}
        given = {"json": body, "headers": headers, "timeout": 60}
        with httpx.stream("POST", f"{narrow.url}/v1/completions", **given) as response:
            has_begun.set()
            for _ in response.iter_raw():
                if narrow.leave.is_set():
                    return

    has_begun, narrow.leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=keep_busy)
    thread.start()
    assert has_begun.wait(60)
    yield narrow
    narrow.leave.set()
    thread.join(60)
    wait_for(narrow, 0)


def test_one_request_of_another_key_overtakes_a_flood(busy):
    done: list[str] = []

    def enter(owner: str) -> None:
        assert ask(busy, owner, 2).status_code == 200
        done.append(owner)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        flood = [pool.submit(enter, "many") for _ in range(20)]
        wait_for(busy, 20)
        late = pool.submit(enter, "late")
        wait_for(busy, 21)
        one = pool.submit(enter, "one")
        wait_for(busy, 22)
        busy.leave.set()
        for task in (*flood, one, late):
            task.result(60)
    assert done.index("one") <= 4  # two may be in the engine before it, and answers cross on their way
    assert done.index("late") >= 18


def test_who_goes_away_while_waiting_leaves_the_queue(busy):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{busy.url}/v1/completions",
            json={"model": "tiny", "prompt": [5], "max_tokens": 2},
            headers={"x-api-key": SECRETS["one"]},
            timeout=0.3,
        )
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
        while sum(task.done() for task in flood) < 30:
            time.sleep(0.01)
        busy.leave.set()
        assert one.result(60).status_code == 200
        assert sorted(task.result(60).status_code for task in flood) == [200] * 20 + [429] * 30
