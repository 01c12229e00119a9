"""GET /metrics of a real server: what it tells, in what form, and that no client can make it grow."""

import asyncio
import json
import os
import signal
import threading
from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from lamina.runtime.sampling_params import SamplingParams
from lamina.serving.metrics.collector import Scraped
from lamina.serving.metrics.families import ENGINE_FAMILIES, FAMILIES, PREFIX, SWAP_FAMILIES

from ...engine_gate import comes_true
from ..raw import post, raw_client
from ..server_process import SMALL, ServerProcess

ALL_HAVE = ("model_name", "engine")


def scraped(client):
    """Every sample by its name and labels, less the names of the one model and the one engine."""
    samples = {}
    for family in parse(client.get("/metrics").text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ALL_HAVE}
            samples[sample.name.removeprefix(PREFIX), *sorted(labels.items())] = sample.value
    return samples


def test_every_figure_is_there_with_its_kind_and_meaning(client):
    page = client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=")
    found = {family.name: family for family in parse(page.text)}
    families = [family for family in FAMILIES if family not in SWAP_FAMILIES]  # those are of several models
    for family in families:
        own = found[PREFIX + family.name]
        assert (own.type, own.documentation) == (family.kind, family.help)
        for sample in own.samples:
            assert sample.labels.keys() - {"le"} == {"model_name", *family.labels}
            assert sample.labels["model_name"] == "tiny"
    assert {name for name in found if name.startswith(PREFIX)} == {
        PREFIX + family.name for family in families
    }


def test_a_client_of_openmetrics_gets_that(client):
    page = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert page.headers["content-type"].startswith("application/openmetrics-text")
    assert {f"{PREFIX}engine_up", f"{PREFIX}generation_tokens"} <= {
        f.name for f in parse_openmetrics(page.text)
    }


def test_one_answer_adds_to_what_it_should(client, server):
    server.comes_to_rest()
    before = scraped(client)
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "n": 2}
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
    answered = ("http_requests_total", ("route", "/v1/completions"), ("status", "200"))
    after = wait_until(client, lambda found: found.get(answered, 0) > before.get(answered, 0))

    def added(*key):
        return after[key] - before.get(key, 0.0)

    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 8)
    assert added("prompt_tokens_total") == 3
    assert added("generation_tokens_total") == 8
    assert added("request_success_total", ("finished_reason", "length")) == 2
    assert added("time_to_first_token_seconds_count") == 2
    assert added("inter_token_latency_seconds_count") == 6
    assert added("request_params_n_sum") == 2
    assert added("request_params_max_tokens_sum") == 4
    assert added(*answered) == 1
    assert added("http_requests_total", ("route", "/metrics"), ("status", "200")) >= 1
    assert added("engine_steps_total") >= 4
    assert after["engine_up",] == 1
    assert 0 <= after["kv_cache_usage_perc",] <= 1
    blocks = {
        state: after["kv_cache_blocks", ("state", state)] for state in ("total", "free", "cached", "used")
    }
    assert blocks["total"] == blocks["free"] + blocks["cached"] + blocks["used"]


def test_nothing_is_left_of_clients_that_leave(client, server):
    body = {"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 3}
    aborted = "request_success_total", ("finished_reason", "abort")
    server.comes_to_rest()
    before = scraped(client)[aborted]
    with server.held() as engine:
        for _ in range(10):
            with raw_client(server.url) as raw:
                raw.send(post("/v1/completions", json.dumps(body).encode()))
                engine.begin(3)
                assert raw.file.readline() == b"HTTP/1.1 200 OK\r\n"
            engine.wait_for(0)
        assert comes_true(lambda: not server.serving.metrics._live)
        assert scraped(client)[aborted] == before + 30


def test_no_client_can_make_a_series(client):
    client.get("/metrics")
    client.get("/nowhere")
    client.post("/v1/completions", json={})
    before = set(scraped(client))
    for number in range(40):
        client.get(f"/nowhere/{number}", headers={"x-request-id": f"id{number}", "user-agent": f"ua{number}"})
        client.get(f"/v1/models/none{number}")
        client.request(f"VERB{number}" if number % 2 else "PUT", "/v1/completions")
        client.post("/v1/completions", json={"model": f"model{number}", "prompt": "a"})
        client.post("/v1/completions", json={f"field{number}": 1, "prompt": "a", "max_tokens": 1})
        client.post("/v1/completions", content=b"{")
    grown = set(scraped(client)) - before
    # at most a route and status that were not met before, each of a fixed set
    assert all(name == "http_requests_total" for name, *_ in grown)
    assert len(grown) <= 8, grown


def test_scrapes_that_come_together_ask_the_engine_once(server):
    asked = []

    async def scrapes():
        page, runtime = server.serving.metrics_page, server.serving.runtime

        class Counting:
            engines = staticmethod(runtime.engines)

            @staticmethod
            async def stats(engine):
                asked.append(engine)
                return await runtime.stats(engine)

        metrics = server.serving.metrics
        page._engines[metrics.model_name, 0]._read_at = float("-inf")
        scraped = [Scraped(metrics=metrics, runtime=Counting())]
        pages = await asyncio.gather(*(page.render(scraped) for _ in range(50)))
        return [text for text, _ in pages]

    pages = server.in_loop(scrapes)
    assert asked == [0]
    assert all(b"lamina:num_requests_running{" in page for page in pages)


def test_a_scrape_is_answered_while_the_engine_hangs_and_once_it_is_gone(start_server):
    server = start_server(settings={"step_timeout": 0.2}, exit_on_engine_loss=False)
    release = threading.Event()

    def hang(prompt, answer, logits):
        release.wait(60)
        return logits

    async def ask():
        params = SamplingParams(max_tokens=2, logits_processors=[hang])
        return asyncio.ensure_future(server.serving.runtime.generate([5, 6], params).output())

    asked = server.in_loop(ask)
    hanging = wait_until(server.client, lambda told: told["engine_up",] == 0)
    assert ("num_requests_running",) not in hanging
    assert hanging["engine_step_seconds",] > 0.2
    release.set()
    server.in_loop(lambda: asyncio.wait((asked,)))
    again = wait_until(
        server.client, lambda told: told["engine_up",] == 1 and ("num_requests_running",) in told
    )
    assert again["request_success_total", ("finished_reason", "length")] == 1
    wait_until(server.client, lambda told: told["event_loop_lag_seconds_count",] > 0)
    server.in_loop(server.serving.runtime.close)
    gone = scraped(server.client)
    assert gone["engine_up",] == 0
    assert ("num_requests_running",) not in gone


def wait_until(client, is_so):
    """Scrapes until it is so, and returns what was told then; the test's own time limit ends it otherwise."""
    while not is_so(told := scraped(client)):
        pass
    return told


def test_an_engine_in_a_process_tells_its_figures_until_it_is_killed(tiny_text_folder):
    options = (*SMALL, "--engine", "process", "--no-exit-on-engine-loss", "--access-log")
    with ServerProcess(tiny_text_folder, *options) as server:
        assert scraped(server.client)["engine_up",] == 0  # while it loads
        client = server.wait_ready()
        assert server.stream(50).result(60).is_whole
        total = "kv_cache_blocks", ("state", "total")
        live = wait_until(client, lambda told: told["engine_steps_total",] >= 50 and total in told)
        assert live["engine_up",] == 1
        assert live["kv_cache_blocks", ("state", "total")] == 2047  # one is nobody's
        assert live["generation_tokens_total",] == 50
        server.wait_for(server.out, r"^\{")  # written by a thread, once the answer is out
        (line,) = [json.loads(line) for line in server.out if line.startswith("{")]
        assert (line["route"], line["output_tokens"], line["ends"]) == ("/v1/completions", 50, ["length"])
        (child,) = children_of(server.process.pid)
        os.kill(child, signal.SIGKILL)
        dead = wait_until(client, lambda told: told["engine_up",] == 0)
        assert not {family.name for family in ENGINE_FAMILIES} & {name for name, *_ in dead}
        assert dead["generation_tokens_total",] == 50


def children_of(pid):
    """The processes that a process has started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]
