"""A server of several models on one device: each answers as it does alone, and no request is lost."""

import asyncio
import json
import random
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from lamina.common.errors import ConfigError, LoadError
from lamina.serving.config import ServeConfig
from lamina.serving.server import Server

from .conftest import NAMES


def wait_until(condition):
    """Returns once the condition holds, which must come."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it does not come to it"
        time.sleep(0.02)


def nothing_is_left(several):
    """Whether no model has a request, or a block that one holds."""

    async def look():
        for serving in several.models:
            if serving.loaded is None:
                continue
            stats = await serving.runtime.stats()
            admission = serving.admission
            held = (admission.num_admitted, admission.num_waiting, stats["blocks"]["used"])
            if any(held) or stats["requests"]["running"] or stats["requests"]["waiting"]:
                return False
        return True

    return several.in_loop(look)


def figures(several, name):
    """The values of one figure by its labels."""
    lines = re.findall(rf"^lamina:{name}{{(.*?)}} (\S+)$", several.client.get("/metrics").text, re.MULTILINE)
    return {labels: float(value) for labels, value in lines}


def test_each_model_answers_as_it_does_alone(several, alone):
    right = {name: alone(name) for name in NAMES}
    assert len(set(right.values())) == len(NAMES)
    for name in "abcbacab":
        assert several.text(name) == right[name]
    assert several.text("alias-of-b") == right["b"]
    assert several.text(None) == right["a"]  # no name means the first
    fingerprints = {several.answer(name).json()["system_fingerprint"] for name in NAMES}
    assert len(fingerprints) == len(NAMES)


def test_requests_to_all_models_at_once_are_answered_each_by_its_own(several, alone):
    right = {name: alone(name) for name in NAMES}
    asked = [NAMES[number % 3] for number in range(24)]
    with ThreadPoolExecutor(len(asked)) as pool:
        assert [*pool.map(several.text, asked)] == [right[name] for name in asked]
    assert nothing_is_left(several)


def test_streams_chats_tokens_and_lists_are_those_of_the_model_that_is_asked(several, alone):
    for name in NAMES:
        body = {"model": name, "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        with several.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            held = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        chunks = [json.loads(each) for each in held if each != "[DONE]"]
        assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == alone(name)
        assert {chunk["model"] for chunk in chunks} == {name}
        chat = {"model": name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        assert several.client.post("/v1/chat/completions", json=chat).json()["model"] == name
        counted = several.client.post("/tokenize", json={"model": name, "prompt": "hello"})
        assert counted.json()["count"] > 0
    listed = several.client.get("/v1/models").json()["data"]
    assert [entry["id"] for entry in listed] == ["a", "b", "alias-of-b", "c"]
    assert [entry["root"] for entry in listed] == ["a", "b", "b", "c"]
    assert several.client.get("/v1/models/alias-of-b").json()["root"] == "b"
    assert several.client.get("/tokenizer_info?model=c").status_code == 200


@pytest.mark.parametrize(
    "method, path", [("POST", "/v1/completions"), ("POST", "/tokenize"), ("GET", "/v1/models/d")]
)
def test_an_unknown_model_is_not_found(several, method, path):
    body = {"json": {"model": "d", "prompt": "hello"}} if method == "POST" else {}
    answer = several.client.request(method, path, **body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "wanted one of a, b, alias-of-b, c" in answer.json()["error"]["message"]
    assert several.client.get("/tokenizer_info?model=d").status_code == 404


def test_metrics_are_of_each_model_and_say_which_is_awake(several):
    several.text("b")
    before = figures(several, "model_swaps_total")
    several.text("c")
    several.text("c")
    after = figures(several, "model_swaps_total")
    assert after['model_name="c"'] == before['model_name="c"'] + 1
    assert after['model_name="b"'] == before['model_name="b"']
    assert figures(several, "model_resident") == {
        'model_name="a"': 0,
        'model_name="b"': 0,
        'model_name="c"': 1,
    }
    assert figures(several, "model_swap_seconds_count") == after
    text = several.client.get("/metrics").text
    assert len(re.findall("^# TYPE lamina:generation_tokens_total ", text, re.MULTILINE)) == 1
    assert {*re.findall(r'model_name="(.*?)"', text)} == {*NAMES}
    tokens = figures(several, "generation_tokens_total")
    assert all(tokens.values())
    asked = figures(several, "http_requests_total")
    assert asked['model_name="c",route="/v1/completions",status="200"'] >= 2


def test_a_server_of_one_model_says_nothing_of_swaps(client):
    text = client.get("/metrics").text
    assert "lamina:generation_tokens_total" in text
    assert "model_resident" not in text
    assert "model_swap" not in text
    assert "models" not in client.get("/health/ready").json()


def test_it_is_ready_while_models_take_turns(several):
    several.text("b")
    ready = several.client.get("/health/ready")
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")
    stand = {name: one["status"] for name, one in ready.json()["models"].items()}
    assert stand == {"a": "swapped_out", "b": "resident", "c": "swapped_out"}


def waiting(several, name):
    """How many requests wait for one model."""

    async def look():
        return several.models.find(name).admission.num_waiting

    return several.in_loop(look)


def test_a_request_of_a_sleeping_model_waits_within_the_bounds_of_any_queue(start_several, alone):
    server = start_several("ab", max_waiting=1)
    server.in_loop(partial(server.models.swapper.hold, "b", 1))
    late = server.client.post(
        "/v1/completions", json={"prompt": "hello", "model": "b"}, headers={"x-request-timeout": "0.2"}
    )
    assert (late.status_code, late.json()["error"]["code"]) == (429, "queue_full")
    assert "has waited" in late.json()["error"]["message"]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.text, "b")
        wait_until(lambda: waiting(server, "b"))
        second = server.answer("b")
        assert (second.status_code, second.json()["error"]["message"]) == (429, "too many requests wait")
        assert server.text("a") == alone("a")
        server.in_loop(partial(server.models.swapper.release, "b"))
        assert first.result() == alone("b")
    assert server.close() == 0


def test_models_are_loaded_when_they_are_first_asked(start_several, folders, alone, tmp_path):
    """By a chat, by token counts or by several at once; one that cannot be is tried again."""
    folder = tmp_path / "late"
    server = start_several({**folders, "late": folder}, lazy_loading=True)

    def stands():
        models = server.client.get("/health/ready").json()["models"]
        return {name: one["status"] for name, one in models.items()}

    assert stands() == {"a": "resident", "b": "not_loaded", "c": "not_loaded", "late": "not_loaded"}
    listed = {entry["id"]: entry for entry in server.client.get("/v1/models").json()["data"]}
    assert [*listed] == ["a", "b", "c", "late"]
    assert "max_model_len" in listed["a"]
    assert "max_model_len" not in listed["b"]
    assert server.text("a") == alone("a")
    assert server.answer("d").status_code == 404
    may_swap = asyncio.Event()
    asyncio.run_coroutine_threadsafe(server.models.swapper.use("a", may_swap.wait), server.server._loop)
    body, limit = {"prompt": "hello", "model": "b"}, {"x-request-timeout": "0.2"}
    hasty = server.client.post("/v1/completions", json=body, headers=limit)
    assert (hasty.status_code, hasty.json()["error"]["code"]) == (429, "queue_full")
    assert "for its model to be loaded" in hasty.json()["error"]["message"]
    server.server._loop.call_soon_threadsafe(may_swap.set)
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(server.text, "bbab")] == [alone(name) for name in "bbab"]
    assert server.client.post("/tokenize", json={"model": "c", "prompt": "hello"}).json()["count"] > 0
    assert stands()["c"] == "resident"
    assert server.text("c") == alone("c")
    refused = server.answer("late")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_awake")
    assert server.text("a") == alone("a")
    assert stands()["late"] == "not_loaded"
    assert figures(server, "model_swap_failures_total")['model_name="late"'] == 1
    assert nothing_is_left(server)
    assert server.close() == 0


def test_what_runs_on_past_the_time_of_a_drain_ends_with_an_error_that_says_so(start_several, alone):
    server, whole = start_several("ab", swap_drain_timeout=0.05), partial(alone, max_tokens=24)
    with ThreadPoolExecutor(3) as pool:
        with server.held() as gate:
            ended = pool.submit(server.answer, "a", max_tokens=24)
            streamed = pool.submit(server.answer, "a", max_tokens=24, stream=True)
            gate.begin(2)
            other = pool.submit(server.text, "b")
            error = ended.result().json()["error"]
            assert (ended.result().status_code, error["code"]) == (503, "model_drained")
            assert "the model a makes room for another, and the request ran on for" in error["message"]
            assert int(ended.result().headers["retry-after"]) > 0
            assert streamed.result().status_code == 200  # it had begun
            assert "makes room for another" in streamed.result().text
        assert other.result() == alone("b")
    assert server.text("a", max_tokens=24) == whole("a")
    assert nothing_is_left(server)
    assert server.close() == 0


def test_what_waits_for_a_sleeping_model_is_served_before_the_server_ends(start_several, alone):
    server = start_several("ab")
    may_swap = asyncio.Event()
    using = server.models.swapper.use("a", may_swap.wait)  # in which nothing is swapped
    asyncio.run_coroutine_threadsafe(using, server.server._loop)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(server.text, "b", stream=False) for _ in range(3)]
        wait_until(lambda: waiting(server, "b") == 3)
        server.server.stop()
        wait_until(lambda: server.client.get("/health").json()["status"] == "draining")
        assert server.answer("b").json()["error"]["code"] == "draining"
        server.server._loop.call_soon_threadsafe(may_swap.set)
        assert [each.result() for each in asked] == [alone("b")] * 3
    assert server.close() == 0


def test_a_model_that_cannot_be_woken_refuses_its_requests_and_the_other_goes_on(
    start_several, folders, alone, tmp_path
):
    keys, folder = tmp_path / "keys.toml", tmp_path / "gone"
    keys.write_text('[keys.boss]\nkey = "boss-secret"\nadmin = true\n')
    keys.chmod(0o600)
    shutil.copytree(folders["b"], folder)
    server = start_several({"a": folders["a"], "gone": folder}, swap_level=2, api_key_file=keys)
    server.client.headers["authorization"] = "Bearer boss-secret"
    assert server.text("gone") == alone("b")
    assert server.text("a") == alone("a")
    (folder / "model.safetensors").rename(folder / "elsewhere")
    for _ in range(2):
        refused = server.answer("gone")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_awake")
        assert "the model gone could not be woken" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert server.text("a") == alone("a")
    assert server.client.get("/health/ready").status_code == 200
    failures = figures(server, "model_swap_failures_total")
    assert failures['model_name="gone"'] >= 1
    assert failures['model_name="a"'] == 0
    assert server.client.post("/wake_up?model=gone").status_code == 503
    (folder / "elsewhere").rename(folder / "model.safetensors")
    assert server.client.post("/wake_up?model=gone").json() == {"is_sleeping": False}
    assert server.text("gone") == alone("b")
    assert server.close() == 0


def test_models_are_administered_one_by_one(start_several, folders, alone, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.boss]\nkey = "boss-secret"\nadmin = true\n')
    keys.chmod(0o600)
    server = start_several("abc", api_key_file=keys, max_resident=2)
    server.client.headers["authorization"] = "Bearer boss-secret"
    post, get = server.client.post, server.client.get
    asleep = {name: get(f"/is_sleeping?model={name}").json()["is_sleeping"] for name in NAMES}
    assert asleep == {"a": False, "b": False, "c": True}
    assert post("/sleep?model=b&level=2").json() == {"is_sleeping": True}
    ready = get("/health/ready")
    assert (ready.status_code, ready.json()["models"]["b"]["status"]) == (200, "asleep")
    assert server.text("c") == alone("c")  # in b's place
    assert post("/sleep").json() == {"is_sleeping": True}  # the first is meant
    assert post("/sleep?model=c").json() == {"is_sleeping": True}
    down = get("/health/ready")
    assert (down.status_code, down.json()["status"]) == (503, "asleep")
    for name in NAMES:
        assert post(f"/wake_up?model={name}").json() == {"is_sleeping": False}
    assert {name: server.text(name) for name in NAMES} == {name: alone(name) for name in NAMES}
    updated = post("/update_weights?model=c", json={"folder": str(folders["b"])})
    assert updated.status_code == 200, updated.text
    assert server.text("c") == alone("b")
    assert server.answer("c").json()["system_fingerprint"] == updated.json()["system_fingerprint"]
    assert server.text("a") == alone("a")
    for path in ("/sleep?model=d", "/wake_up?model=d", "/is_sleeping?model=d"):
        assert server.client.request("GET" if "is_" in path else "POST", path).status_code == 404
    assert server.close() == 0


def test_any_traffic_ends_once_each_and_leaves_nothing(several, alone):
    """Whole answers, streams, streams that break off, aborts and time limits, to all models at once."""
    seed = random.Random(7)
    right = {name: alone(name, max_tokens=24) for name in NAMES}
    kinds = ("whole", "stream", "broken", "aborted", "late")
    asked = [(seed.choice(NAMES), seed.choice(kinds), f"id-{number}") for number in range(60)]
    before = num_completions(several)
    with ThreadPoolExecutor(12) as pool:
        ended = [*pool.map(lambda each: end_of(several, *each), asked)]
    for (name, kind, _), (status, text, is_cut) in zip(asked, ended, strict=True):
        assert status in OUTCOMES[kind], (kind, status, text)
        if status == 200 and not is_cut:
            assert text == right[name], (name, kind)
    assert {kind for _, kind, _ in asked} == {*kinds}
    wait_until(lambda: nothing_is_left(several))
    wait_until(lambda: num_completions(several) >= before + len(asked))
    assert num_completions(several) == before + len(asked)
    assert {name: several.text(name, max_tokens=24) for name in NAMES} == right


def num_completions(several):
    """How many completions have ended, whichever way."""
    found = figures(several, "http_requests_total")
    return sum(count for labels, count in found.items() if 'route="/v1/completions"' in labels)


OUTCOMES = {
    "whole": {200},
    "stream": {200},
    "broken": {200},
    "aborted": {200, 499},
    "late": {200, 408, 429},
}
LIMITS = {"late": {"x-request-timeout": "0.05"}}


def end_of(several, name, kind, request_id):
    """Asks in one of the ways; status, text, and whether the answer is no whole one."""
    body = {"model": name, "prompt": "hello", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    headers = {"x-request-id": request_id, **LIMITS.get(kind, {})}
    if kind in ("whole", "late", "aborted"):
        aborting = threading.Thread(target=several.client.delete, args=(f"/v1/requests/{request_id}",))
        if kind == "aborted":
            aborting.start()
        answer = several.client.post("/v1/completions", json=body, headers=headers)
        if kind == "aborted":
            aborting.join()
        if answer.status_code != 200:
            return answer.status_code, answer.text, True
        choice = answer.json()["choices"][0]
        return 200, choice["text"], choice["finish_reason"] != "length"
    text = ""
    with several.client.stream(
        "POST", "/v1/completions", json=body | {"stream": True}, headers=headers
    ) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if kind == "broken":
                    break
    return reply.status_code, text, kind == "broken"


@pytest.mark.parametrize(
    ("names", "more", "words"),
    [
        (("a", "a"), {}, "model_names has 'a' twice"),
        (("a", "b"), {"lora_modules": ("x=/one",)}, "model_names has 'x' twice"),
        (("a", "b"), {"max_waiting": 0}, "max_waiting is 0; wanted 1 or more"),
    ],
)
def test_what_models_cannot_have_together_is_refused_by_name(names, more, words):
    first, second = (ServeConfig(model_names=(name,), **more) for name in names)
    with pytest.raises(ConfigError, match=re.escape(words)):
        Server(first, None, [(second, None)])


def test_one_that_cannot_be_loaded_ends_the_server_with_those_that_were(start_several, folders, tmp_path):
    def engines():
        return {each for each in threading.enumerate() if each.name == "lamina-core"}

    (tmp_path / "config.json").write_text("{}")
    before = engines()
    with pytest.raises(LoadError):
        start_several({"a": tmp_path, "b": folders["b"]})
    wait_until(lambda: engines() <= before)
