"""Requests end by their id: only for the key that made them, and only those."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest

from ...engine_gate import comes_true

SECRETS = {"alice": "sk-alice", "bob": "sk-bob"}
LONG = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}
PRINTABLE = "".join(map(chr, range(ord("!"), ord("~") + 1)))  # all that an id may hold


@pytest.fixture(scope="module")
def shared(start_server, tmp_path_factory):
    """A server of two keys that computes six sequences at once, and admits nine."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text("".join(f'[keys.{name}]\nkey = "{secret}"\n' for name, secret in SECRETS.items()))
    path.chmod(0o600)
    return start_server(api_key_file=path, settings={"max_num_seqs": 6})


def headers(owner: str, request_id: str | None = None) -> dict[str, str]:
    named = {} if request_id is None else {"X-Request-Id": request_id}
    return {"x-api-key": SECRETS[owner], **named}


class Streaming:
    """A stream that is read in a thread of its own, so that it goes on meanwhile."""

    def __init__(self, server, owner: str, header: str | None = None, timeout=None, **fields) -> None:
        self.server, self.fields, self.headers = server, fields, headers(owner, header)
        if timeout is not None:
            self.headers["x-request-timeout"] = str(timeout)
        self.events: list[dict] = []
        self.lines: list[str] = []
        self.status = None
        self.has_begun = threading.Event()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        body = {**LONG, "stream": True, **self.fields}
        given = {"json": body, "headers": self.headers}
        with self.server.client.stream("POST", "/v1/completions", **given) as response:
            self.status = response.status_code
            for line in filter(None, response.iter_lines()):
                self.lines.append(line)
                if line.startswith("data: {"):
                    self.events.append(json.loads(line[6:]))
                    self.has_begun.set()
        self.has_begun.set()

    @property
    def reasons(self) -> list[str]:
        self.thread.join(60)
        assert not self.thread.is_alive()
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


def abort(server, owner: str, request_id: str, method: str = "POST"):
    path = f"/v1/requests/{request_id}" + ("/abort" if method == "POST" else "")
    return server.client.request(method, path, headers=headers(owner))


def begin(engine, *streams: Streaming, num_live: int) -> None:
    """Has the engine write the first tokens of all these."""
    engine.begin(num_live)
    for streaming in streams:
        assert streaming.has_begun.wait(60)


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_request_ends_by_the_id_of_its_response(shared, method):
    with shared.held() as engine:
        streaming = Streaming(shared, "alice", n=4)
        begin(engine, streaming, num_live=4)
        answer = abort(shared, "alice", streaming.events[0]["id"], method)
        assert (answer.status_code, answer.json()["aborted"]) == (200, True)
        assert streaming.reasons == ["abort"] * 4
        assert abort(shared, "alice", streaming.events[0]["id"]).status_code == 404
    shared.comes_to_rest()


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize("request_id", ["mine", "jobs/7", "/", "a/abort", "../x", PRINTABLE])
def test_a_request_ends_by_the_id_that_its_client_gave(shared, request_id, method):
    with ThreadPoolExecutor() as pool, shared.held() as engine:  # a failure lets it answer
        given = {"json": LONG, "headers": headers("alice", request_id)}
        asking = pool.submit(shared.client.post, "/v1/completions", **given)
        engine.wait_for(1)
        assert abort(shared, "alice", quote(request_id, safe=""), method).status_code == 200
        answer = asking.result(60)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "abort"
    shared.comes_to_rest()


def test_another_key_finds_no_such_request(shared):
    with shared.held() as engine:
        streaming = Streaming(shared, "alice", "mine")
        begin(engine, streaming, num_live=1)
        for request_id in ("mine", streaming.events[0]["id"]):
            answer = abort(shared, "bob", request_id)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "request_not_found"
    assert streaming.reasons == ["length"]


def test_of_two_keys_that_choose_one_id_each_ends_its_own(shared):
    with shared.held() as engine:
        hers = Streaming(shared, "alice", "same", request_id="same", n=4)
        engine.wait_for(4)
        his = Streaming(shared, "bob", "same", request_id="same", n=4)
        begin(engine, hers, his, num_live=8)
        assert hers.events[0]["id"] == his.events[0]["id"]
        assert abort(shared, "bob", "same").status_code == 200
        assert his.reasons == ["abort"] * 4
        assert engine.num_live == 4
    assert hers.reasons == ["length"] * 4
    shared.comes_to_rest()


def test_all_answers_of_a_request_end_with_it(shared):
    with shared.held() as engine:
        streaming = Streaming(shared, "alice", "many", prompt=[[5, 6], [7, 8]], n=2)
        begin(engine, streaming, num_live=4)
        assert abort(shared, "alice", "many").status_code == 200
        assert streaming.reasons == ["abort"] * 4
    shared.comes_to_rest()


def test_a_request_that_waits_for_its_turn_ends_too(shared):
    with shared.held() as engine:
        running = [Streaming(shared, "alice", f"running-{n}", n=3) for n in range(3)]
        engine.wait_for(9)
        waiting = Streaming(shared, "alice", "waiting")
        assert comes_true(lambda: shared.serving.admission.num_waiting == 1)
        assert abort(shared, "alice", "waiting").status_code == 200
        assert (waiting.reasons, waiting.status) == ([], 499)
        for n, streaming in enumerate(running):
            assert abort(shared, "alice", f"running-{n}").status_code == 200
            assert streaming.reasons == ["abort"] * 3
    shared.comes_to_rest()


@pytest.mark.parametrize("request_id", ["nothing", "chatcmpl-1", "%20", "%00", "..", "a" * 3000, "%2F", "é"])
def test_an_id_that_nothing_has_is_not_found(shared, request_id):
    assert abort(shared, "alice", request_id).status_code == 404


def test_the_time_that_a_client_gives_ends_its_request_with_an_error(shared):
    with shared.held():
        late = {"json": {**LONG, "n": 8}, "headers": {**headers("bob"), "x-request-timeout": "0.02"}}
        answer = shared.client.post("/v1/completions", **late)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
    shared.comes_to_rest()


def test_the_time_that_a_client_gives_ends_a_stream_that_has_begun_with_an_error(shared):
    with shared.held() as engine:
        streaming = Streaming(shared, "bob", timeout=600, n=8)
        begin(engine, streaming, num_live=8)
        engine.pass_time(600)
        assert streaming.reasons == []
    assert streaming.status == 200
    assert [event["error"]["code"] for event in streaming.events if "error" in event] == ["timeout"]
    assert streaming.lines[-1] == "data: [DONE]"
    shared.comes_to_rest()
