"""Requests end by their id: only for the key that made them, and only those."""

import json
import threading
import time

import pytest

SECRETS = {"alice": "sk-alice", "bob": "sk-bob"}
LONG = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared(start_server, tmp_path_factory):
    """A server of two keys with room for few, and slow enough that its answers can be ended."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text("".join(f'[keys.{name}]\nkey = "{secret}"\n' for name, secret in SECRETS.items()))
    path.chmod(0o600)
    return start_server(api_key_file=path, settings={"max_num_seqs": 2})


def headers(owner: str, request_id: str | None = None) -> dict[str, str]:
    named = {} if request_id is None else {"X-Request-Id": request_id}
    return {"x-api-key": SECRETS[owner], **named}


class Streaming:
    """A stream that is read in a thread of its own, so that it goes on meanwhile."""

    def __init__(self, server, owner: str, header: str | None = None, **fields) -> None:
        self.server, self.owner, self.header, self.fields = server, owner, header, fields
        self.events: list[dict] = []
        self.status = None
        self.has_begun = threading.Event()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        body = {**LONG, "stream": True, **self.fields}
        given = {"json": body, "headers": headers(self.owner, self.header)}
        with self.server.client.stream("POST", "/v1/completions", **given) as response:
            self.status = response.status_code
            for line in response.iter_lines():
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


def is_idle(server) -> bool:
    async def look():
        books, stats = server.serving.admission, await server.serving.runtime.stats()
        return not books.num_admitted and not books.num_waiting, stats

    for _ in range(200):
        idle, stats = server.in_loop(look)
        if idle and not stats["requests"]["running"] and stats["blocks"]["used"] == 0:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_request_ends_by_the_id_of_its_response(shared, method):
    streaming = Streaming(shared, "alice", n=4)
    assert streaming.has_begun.wait(60)
    answer = abort(shared, "alice", streaming.events[0]["id"], method)
    assert (answer.status_code, answer.json()["aborted"]) == (200, True)
    assert len(streaming.reasons) == 4
    assert streaming.reasons[-1] == "abort"
    assert is_idle(shared)
    assert abort(shared, "alice", streaming.events[0]["id"]).status_code == 404


def test_a_request_ends_by_the_id_that_its_client_gave(shared):
    def ask():
        given = {"json": LONG, "headers": headers("alice", "mine")}
        answers.append(shared.client.post("/v1/completions", **given))

    answers = []
    thread = threading.Thread(target=ask)
    thread.start()
    while abort(shared, "alice", "mine").status_code == 404 and thread.is_alive():
        time.sleep(0.005)
    thread.join(60)
    (answer,) = answers
    assert answer.status_code in (200, 499)
    if answer.status_code == 200:
        assert answer.json()["choices"][0]["finish_reason"] == "abort"
    assert is_idle(shared)


def test_another_key_finds_no_such_request(shared):
    streaming = Streaming(shared, "alice", "mine")
    assert streaming.has_begun.wait(60)
    for request_id in ("mine", streaming.events[0]["id"]):
        answer = abort(shared, "bob", request_id)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "request_not_found"
    assert streaming.reasons == ["length"]


def test_of_two_keys_that_choose_one_id_each_ends_its_own(shared):
    hers = Streaming(shared, "alice", "same", request_id="same", n=4)
    his = Streaming(shared, "bob", "same", request_id="same", n=4)
    assert hers.has_begun.wait(60)
    assert his.has_begun.wait(60)
    assert hers.events[0]["id"] == his.events[0]["id"]
    assert abort(shared, "bob", "same").status_code == 200
    assert his.reasons[-1] == "abort"
    assert hers.reasons == ["length"] * 4
    assert is_idle(shared)


def test_all_answers_of_a_request_end_with_it(shared):
    streaming = Streaming(shared, "alice", "many", prompt=[[5, 6], [7, 8]], n=2)
    assert streaming.has_begun.wait(60)
    assert abort(shared, "alice", "many").status_code == 200
    reasons = streaming.reasons
    assert len(reasons) == 4
    assert "abort" in reasons
    assert is_idle(shared)


def test_a_request_that_waits_for_its_turn_ends_too(shared):
    running = [Streaming(shared, "alice", f"running-{n}") for n in range(3)]
    for streaming in running:
        assert streaming.has_begun.wait(60)
    waiting = Streaming(shared, "alice", "waiting")
    while abort(shared, "alice", "waiting").status_code == 404 and waiting.thread.is_alive():
        time.sleep(0.005)
    assert waiting.reasons in ([], ["abort"])
    for n in range(3):
        abort(shared, "alice", f"running-{n}")
    assert is_idle(shared)


@pytest.mark.parametrize("request_id", ["nothing", "chatcmpl-1", "%20", "%00", "..", "a" * 3000, "%2F", "é"])
def test_an_id_that_nothing_has_is_not_found(shared, request_id):
    assert abort(shared, "alice", request_id).status_code == 404


def test_the_time_that_a_client_gives_ends_its_request_with_an_error(shared):
    slow = {"json": {**LONG, "n": 8}, "headers": {**headers("bob"), "x-request-timeout": "0.02"}}
    whole = shared.client.post("/v1/completions", **slow)
    assert whole.status_code in (408, 429)
    assert whole.json()["error"]["code"] in ("timeout", "queue_full")
    slow["json"] = {**slow["json"], "stream": True}
    lines = shared.client.post("/v1/completions", **slow).text.strip().split("\n\n")
    if len(lines) > 1:
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2][6:])["error"]["code"] == "timeout"
        assert '"finish_reason":"abort"' not in "".join(lines)
    assert is_idle(shared)
