"""`lamina serve a=… b=…` with each engine in a process of its own: turns, the end, and a lost engine."""

import os
import re
import signal
import time

import pytest

from ..server_process import LONG, SMALL, ServerProcess
from ..test_server import children_of

pytestmark = pytest.mark.long
OPTIONS = (*SMALL, *LONG, "--min-residence", "0", "--drain-timeout", "600")


def start(folders, *options):
    return ServerProcess(f"a={folders['a']}", f"b={folders['b']}", *OPTIONS, *options)


def asked(client, name):
    body = {"model": name, "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", json=body)


def text(client, name):
    answer = asked(client, name)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def wait_until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it does not come to it"
        time.sleep(0.02)


def figure(client, name, labels):
    """A value of /metrics; 0.0 where it is not there yet."""
    found = re.search(rf"^lamina:{name}{{{labels}}} (\S+)", client.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_they_take_turns_and_what_waits_is_served_before_the_end(folders, alone):
    with start(folders) as server:
        client = server.wait_ready()
        assert len(children_of(server.process.pid)) == 2
        for name in "abba":
            assert text(client, name) == alone(name)
        before = figure(client, "generation_tokens_total", 'model_name="a"')
        first = server.stream(300, model="a")
        wait_until(lambda: figure(client, "generation_tokens_total", 'model_name="a"') > before)
        second = server.stream(40, model="b")  # b sleeps until a's has ended
        place = 'model_name="b",place="server"'
        wait_until(lambda: figure(client, "num_requests_waiting_by_place", place) or second.done())
        server.signal(signal.SIGTERM)
        for stream in (first, second):
            assert stream.result(120).is_whole
            assert stream.result().finish_reason == "length"
        assert server.code() == 0


def test_where_one_is_lost_the_other_goes_on(folders, alone):
    with start(folders, "--no-exit-on-engine-loss") as server:
        client = server.wait_ready()
        os.kill(children_of(server.process.pid)[0], signal.SIGKILL)
        wait_until(lambda: client.get("/health/ready").status_code == 503)
        report = client.get("/health/ready").json()
        assert report["status"] == "failed"
        (lost,) = (name for name, one in report["models"].items() if one["status"] == "failed")
        other = "ab".replace(lost, "")
        wait_until(lambda: asked(client, lost).json()["error"]["code"] == "failed")
        for _ in range(2):
            assert text(client, other) == alone(other)
        server.signal(signal.SIGTERM)
        assert server.code() == 1


def test_a_lost_one_is_loaded_again_with_the_others(folders, alone):
    with start(folders, "--max-restarts", "1") as server:
        client, lost = server.wait_ready(), children_of(server.process.pid)
        os.kill(lost[0], signal.SIGKILL)

        def is_loaded_again():
            children = children_of(server.process.pid)
            is_ready = client.get("/health/ready").status_code == 200
            return is_ready and len(children) == 2 and not {*children} & {*lost}

        wait_until(is_loaded_again)
        for name in "abba":
            assert text(client, name) == alone(name)
        server.signal(signal.SIGTERM)
        assert server.code() == 0
    assert sum("are loaded again" in line for line in server.errors) == 1
