"""benchmarks/serving.py against a real server: it counts what was sent, and says what failed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "serving.py"
LOAD = ["--ids", "10", "200", "--prompt-tokens", "4", "40", "--output-tokens", "8"]


def run(server, output, *arguments):
    command = [sys.executable, str(SCRIPT), "--base-url", f"{server.url}/v1", *LOAD, "--output", str(output)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text())["loads"], done.stdout


@pytest.mark.parametrize("processes", ["1", "2"])
def test_every_token_of_a_closed_and_an_open_loop_is_counted(server, tmp_path, processes):
    asked = ["--concurrency", "3", "--rate", "50", "--requests", "7", "--processes", processes]
    loads, printed = run(server, tmp_path / "out.json", *asked)
    assert len(printed.splitlines()) == 1 + len(loads) == 3
    for load in loads:
        assert (load["requests"], load["failed"], load["errors"]) == (7, 0, [])
        rounding = load["output_tokens_s"] * 0.0005 + load["seconds"] * 0.05
        assert load["output_tokens_s"] * load["seconds"] == pytest.approx(7 * 8, abs=rounding + 0.01)
        assert 0 < load["first_token_ms"]["p50"] <= load["first_token_ms"]["p99"] <= load["seconds"] * 1e3
        assert load["between_tokens_ms"]["p50"] > 0
        assert 0 <= load["goodput_requests_s"] <= load["requests_s"]


def test_more_clients_than_requests_at_a_time_leave_none_out(server, tmp_path):
    asked = ["--concurrency", "1", "--requests", "5", "--processes", "3"]
    (load,), _ = run(server, tmp_path / "out.json", *asked)
    assert (load["requests"], load["failed"]) == (5, 0)


def test_requests_that_fail_are_counted_and_said(server, tmp_path):
    asked = ["--concurrency", "2", "--requests", "3", "--model", "another"]
    (load,), printed = run(server, tmp_path / "out.json", *asked)
    assert (load["requests"], load["failed"], load["output_tokens_s"]) == (3, 3, 0)
    assert "404" in load["errors"][0]
    assert "3 FAILED: 404" in printed


def test_a_limit_that_nobody_keeps_leaves_no_goodput(server, tmp_path):
    (load,), _ = run(server, tmp_path / "out.json", "--concurrency", "2", "--slo-first", "1e-9")
    assert load["failed"] == load["goodput_requests_s"] == 0 < load["requests_s"]


def test_servers_are_asked_in_turn_by_the_same_prompts_and_by_others_in_the_next_round(server, tmp_path):
    other = server.url.replace("127.0.0.1", "localhost") + "/v1"
    asked = ["--base-url", f"{server.url}/v1", other, "--rounds", "2"]
    asked += ["--concurrency", "2", "--requests", "3"]
    loads, printed = run(server, tmp_path / "out.json", *asked)
    assert [(load["server"], load["seed"]) for load in loads] == [
        (url, seed) for seed in (0, 1) for url in (f"{server.url}/v1", other)
    ]
    assert all(load["failed"] == 0 for load in loads)
    assert printed.count(other) == 2
