"""A real server over two engines: who answers, how one is drained, and what becomes of one that is killed."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from lamina.runtime.engine import core_process

from .conftest import RunningServer

KEYS = """
[keys.boss]
key = "boss-secret"
admin = true

[keys.user]
key = "user-secret"
"""
BOSS = {"Authorization": "Bearer boss-secret"}
USER = {"Authorization": "Bearer user-secret"}
ANY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


class TwoEngines(RunningServer):
    """Its engines are processes, as those of `lamina serve --data-parallel 2`."""

    async def _open(self):
        from lamina.runtime.async_runtime import AsyncRuntime

        return await AsyncRuntime.from_pretrained(
            self.folder, engine="process", data_parallel=2, **self.settings
        )

    def ask(self, **fields):
        return self.client.post("/v1/completions", json=ANY | fields, headers=USER)

    def admin(self, method, path):
        answer = self.client.request(method, path, headers=BOSS)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def engines(self):
        return self.admin("GET", "/engines")["engines"]

    def wait_for(self, holds):
        """Waits until it holds of the engines; the test's own limit ends it otherwise."""
        while not holds(engines := self.engines()):
            time.sleep(0.05)
        return engines

    def wait_for_figures(self, holds):
        """Waits until it holds of what /metrics tells, which may be a second old."""
        while not holds(found := self.scraped()):
            time.sleep(0.05)
        return found

    def scraped(self):
        """Samples of /metrics, by name and labels less the model's name."""
        text = self.client.get("/metrics", headers=USER).text
        samples = [sample for family in parse(text) for sample in family.samples]
        return {
            (
                each.name.removeprefix("lamina:"),
                *sorted(set(each.labels.items()) - {("model_name", "tiny")}),
            ): each.value
            for each in samples
        }


@pytest.fixture(scope="module")
def two(tiny_text_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(KEYS)
    path.chmod(0o600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_process, "SILENT_SECONDS", 600.0)  # a loaded machine makes no engine hang
        server = TwoEngines(tiny_text_folder, {"api_key_file": path}, {})
        yield server
        assert server.close() == 0


def on_each(two, **fields):
    """The answers of engine 0 and of engine 1 to one request, the other one being drained."""
    found = []
    for engine in (0, 1):
        two.admin("POST", f"/engines/{1 - engine}/drain")
        answer = two.ask(**fields)
        assert answer.headers["x-lamina-engine"] == str(engine)
        found.append([choice["token_ids"] for choice in answer.json()["choices"]])
        two.admin("POST", f"/engines/{1 - engine}/resume")
    return found


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.2, "seed": 3, "n": 2}], ids=["greedy", "seeded"])
def test_either_engine_gives_the_same_answers(two, fields):
    first, second = on_each(two, prompt=[5, 6, 7], **fields)
    assert first == second


def test_a_conversation_stays_with_its_blocks_and_figures_say_whose_they_are(two):
    hits = {engine: ("prefix_cache_hits_total", ("engine", engine)) for engine in "01"}
    before = two.wait_for_figures(lambda found: found.keys() >= {*hits.values()})
    first = two.ask(prompt=[9] * 40)
    engine = first.headers["x-lamina-engine"]
    for rest in range(3):
        again = two.ask(prompt=[9] * 40 + [rest])
        assert again.headers["x-lamina-engine"] == engine
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    after = two.wait_for_figures(
        lambda found: found.keys() >= {*hits.values()} and found[hits[engine]] == before[hits[engine]] + 96
    )
    own, other = ("engine", engine), ("engine", str(1 - int(engine)))

    def added(name, *labels):
        return after[name, *labels] - before[name, *labels]

    assert added("prefix_cache_hits_total", other) == 0
    assert added("engine_requests_total", ("by", "prefix"), own) == 3
    assert [added("engine_requests_total", ("by", by), other) for by in ("load", "prefix")] == [0, 0]
    for each in (own, other):
        assert after["engine_up", each] == after["engine_takes_requests", each] == 1
    assert added("prompt_tokens_total") == 40 + 3 * 41


def test_streams_of_a_drained_engine_end_whole_while_others_begin_elsewhere(two):
    def stream(number):
        body = ANY | {"prompt": [10 + number] * 3, "max_tokens": 200, "stream": True}
        with two.client.stream("POST", "/v1/completions", json=body, headers=USER) as answer:
            engine = answer.headers["x-lamina-engine"]
            begun.release()
            return engine, answer.read().decode()

    begun = threading.Semaphore(0)
    with ThreadPoolExecutor() as pool:
        streams = [pool.submit(stream, number) for number in range(6)]
        for _ in streams:
            begun.acquire()
        two.admin("POST", "/engines/0/drain")
        assert {two.ask(prompt=[20 + number] * 3).headers["x-lamina-engine"] for number in range(3)} == {"1"}
        last = two.client.post("/engines/1/drain", headers=BOSS)
        assert (last.status_code, "the last that takes requests" in last.text) == (400, True)
        ended = [each.result() for each in streams]
    assert {engine for engine, _ in ended} == {"0", "1"}
    assert all(text.endswith("data: [DONE]\n\n") and '"length"' in text for _, text in ended)
    assert two.wait_for(lambda engines: engines[0]["state"] == "drained")[1]["state"] == "serving"
    assert two.admin("POST", "/engines/0/resume")["state"] == "serving"


def test_a_killed_engine_takes_its_requests_with_it_and_is_started_anew(two):
    members = two.serving.runtime._client._handle._engines._members
    pid = members[1].core.pid
    two.admin("POST", "/engines/0/drain")
    os.kill(pid, signal.SIGSTOP)  # so that nothing ends before it is killed
    with ThreadPoolExecutor() as pool:
        lost = pool.submit(two.ask, prompt=[5, 6, 7])
        two.wait_for(lambda engines: engines[1]["num_requests"] == 1)
        two.admin("POST", "/engines/0/resume")
        os.kill(pid, signal.SIGKILL)
        answer = lost.result()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_lost"
    assert "retry-after" in answer.headers
    health = two.client.get("/health", headers=USER)
    assert health.status_code == 200
    assert [engine["engine"] for engine in health.json()["engines"]] == [0, 1]
    assert two.ask(prompt=[5, 6, 7]).status_code == 200
    two.wait_for(lambda engines: [each["state"] for each in engines] == ["serving", "serving"])
    first, second = on_each(two, prompt=[5, 6, 7])
    assert first == second
