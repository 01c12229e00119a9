"""A server that is put to sleep, woken and given weights by whoever has an admin key, and by nobody else."""

import json
import threading
import time

import pytest

from lamina import Runtime, SamplingParams

KEYS = """
[keys.boss]
key = "boss-secret"
admin = true

[keys.user]
key = "user-secret"
"""
BOSS = {"Authorization": "Bearer boss-secret"}
USER = {"Authorization": "Bearer user-secret"}
ASKED = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
CALLS = [("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping"), ("POST", "/update_weights")]
CALLS += [("GET", "/engines"), ("POST", "/engines/0/drain"), ("POST", "/engines/0/resume")]


@pytest.fixture(scope="module")
def own(start_server, tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(KEYS)
    path.chmod(0o600)
    running = start_server(api_key_file=path)
    yield running
    running.close()


def asked(own, headers=USER):
    answer = own.client.post("/v1/completions", json=ASKED | {"return_token_ids": True}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"], answer.json()["system_fingerprint"]


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_nobody_but_an_admin_key_may(own, server, method, path):
    for client, headers, status in ((own, USER, 403), (own, {}, 401), (server, {}, 403), (server, BOSS, 403)):
        answer = client.client.request(method, path, headers=headers)
        assert answer.status_code == status, answer.text
        if status == 403:
            assert answer.json()["error"]["code"] == "admin_only"
    assert own.client.get("/is_sleeping", headers=BOSS).json() == {"is_sleeping": False}


@pytest.mark.parametrize("level", ["", "?level=1", "?level=2"])
def test_requests_wait_while_it_sleeps_and_are_answered_alike(own, level):
    right, answers = asked(own), []
    assert own.client.post(f"/sleep{level}", headers=BOSS).json() == {"is_sleeping": True}
    assert own.client.get("/is_sleeping", headers=BOSS).json() == {"is_sleeping": True}
    asking = threading.Thread(target=lambda: answers.append(asked(own)))
    asking.start()
    while not _waits(own):
        time.sleep(0.01)
    ready = own.client.get("/health/ready", headers=USER)
    while ready.json()["status"] == "ready":  # a moment ago it was
        ready = own.client.get("/health/ready", headers=USER)
    assert (ready.status_code, ready.json()["status"]) == (503, "asleep")
    late = own.client.post("/v1/completions", json=ASKED, headers={**USER, "x-request-timeout": "0.2"})
    assert late.status_code == 408, late.text
    assert not answers
    assert own.client.post("/wake_up", headers=BOSS).json() == {"is_sleeping": False}
    asking.join(60)
    assert answers == [right]
    assert own.client.get("/health/ready", headers=USER).status_code == 200


def _waits(own):
    return own.in_loop(own.serving.runtime.stats)["requests"]["waiting"]


def test_weights_of_a_folder_are_used_and_change_the_fingerprint(own, make_tiny_folder, tiny_text_folder):
    other = make_tiny_folder(seed=1)
    settings = {"device": "cpu", "compile": False, "num_kv_blocks": 256, "tokenizer": str(tiny_text_folder)}
    with Runtime.from_pretrained(other, **settings) as runtime:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        right = [*runtime.generate([ASKED["prompt"]], params)[0].outputs[0].token_ids]
    before, fingerprint = asked(own)
    updated = own.client.post("/update_weights", json={"folder": str(other)}, headers=BOSS)
    assert updated.status_code == 200, updated.text
    assert asked(own) == (right, updated.json()["system_fingerprint"])
    assert updated.json()["system_fingerprint"] != fingerprint
    own.client.post("/update_weights", json={"folder": str(tiny_text_folder)}, headers=BOSS)
    assert asked(own) == (before, fingerprint)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/sleep?level=3", None, "level is '3'; wanted 1 or 2"),
        ("/sleep?mode=abort", None, "'mode' is no parameter of /sleep"),
        ("/wake_up?tags=weights", None, "'tags' is no parameter"),
        ("/update_weights", {}, "wanted one of folder and group"),
        (
            "/update_weights",
            {"folder": "a", "group": {"port": 5000, "world_size": 2, "rank": 1}},
            "wanted one of folder and group",
        ),
        ("/update_weights", {"folder": "/nowhere/at/all"}, "nowhere"),
        ("/update_weights", {"folder": 5}, "folder"),
        ("/update_weights", {"group": {"port": 5000, "world_size": 2, "rank": 7}}, "rank is 7"),
        ("/update_weights", {"group": {"port": 5000}}, "group"),
        ("/update_weights", {"group": {"prt": 5000}}, "group"),
        ("/update_weights", {"weights": {}}, "weights"),
    ],
)
def test_what_cannot_be_is_said_and_changes_nothing(own, path, body, words):
    before = asked(own)
    content = (
        {} if body is None else {"content": json.dumps(body), "headers": {"content-type": "application/json"}}
    )
    headers = BOSS | content.pop("headers", {})
    answer = own.client.post(path, headers=headers, **content)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert asked(own) == before


def test_the_only_engine_is_named_and_cannot_be_drained(own):
    only = {"engine": 0, "state": "serving", "reason": None, "num_requests": None}
    assert own.client.get("/engines", headers=BOSS).json() == {"engines": [only]}
    for path, status in (("0/drain", 400), ("0/resume", 400), ("x/drain", 404)):
        answer = own.client.post(f"/engines/{path}", headers=BOSS)
        assert answer.status_code == status, answer.text
