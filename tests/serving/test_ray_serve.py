"""`lamina serve --ray`: replicas behind Ray Serve answer as a server does; one that is killed comes again."""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from lamina import Runtime, SamplingParams
from lamina.common.errors import ConfigError, UnknownSettingError, UnsupportedError
from lamina.serving.config import ServeConfig
from lamina.serving.ray_config import RayServeConfig
from lamina.serving.ray_serve import application, serve_on_ray

from .server_process import SMALL, ServerProcess

PROMPTS = ["hello", "once upon", "a b c", "lamina"]
FEW = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
MARK = "LAMINA_RAY_SERVE_TEST"


@pytest.mark.parametrize(
    "given, wanted",
    [
        ({}, {"num_replicas": 1}),
        ({"min_replicas": 3}, {"num_replicas": 3}),
        (
            {"min_replicas": 1, "max_replicas": 4, "ongoing_requests": 7.5},
            {
                "autoscaling_config": {
                    "min_replicas": 1,
                    "max_replicas": 4,
                    "target_ongoing_requests": 7.5,
                }
            },
        ),
    ],
)
def test_as_many_replicas_as_there_is_work_for(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert RayServeConfig(**given).options == wanted


@pytest.mark.parametrize(
    "given, words",
    [
        ({"min_replicas": 0}, "min_replicas is 0; wanted .*from 1 to 4096"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas is 2; wanted .*from 3 to 4096"),
        ({"ongoing_requests": 0}, "ongoing_requests is 0; wanted .*above 0"),
        ({"num_gpus": -1}, "num_gpus is -1; wanted .*at least 0"),
        ({"num_cpus": "x"}, "num_cpus is 'x'"),
    ],
)
def test_what_replicas_cannot_be_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RayServeConfig(**given)
    with pytest.raises(UnknownSettingError, match="max_replica"):
        RayServeConfig(max_replica=3)  # type: ignore[call-arg]


def test_what_ray_serve_has_no_way_for_is_refused_before_a_cluster_is_joined(tmp_path: Path) -> None:
    for own, error in (({"uds": tmp_path / "socket"}, UnsupportedError), ({"port": 0}, ConfigError)):
        with pytest.raises(error, match=next(iter(own))):
            serve_on_ray(ServeConfig(model_names=("m",), **own), RayServeConfig(), "m")
    with pytest.raises(UnsupportedError, match="executor is 'ray'"):
        application({"model": "m", "settings": {"executor": "ray"}})
    for wrong in ({}, {"model": "m", "setting": {}}, {"model": 3}):
        with pytest.raises(ConfigError, match="wanted model, serve, settings, replicas and engine"):
            application(wrong)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def processes(mark: str, name: str = "") -> set[int]:
    """Processes whose environment has the mark, and whose command begins so."""
    found = set()
    for folder in Path("/proc").iterdir():
        try:
            is_ours = folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes()
            if is_ours and (folder / "cmdline").read_bytes().startswith(name.encode()):
                found.add(int(folder.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


def patience(seconds: float = 300) -> Iterator[None]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield
        time.sleep(0.1)
    raise AssertionError("it does not come to it")


def ask(client: httpx.Client, prompt: str, **fields: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": prompt, **FEW, **fields})


@pytest.mark.long
def test_replicas_answer_as_a_server_does_and_one_that_is_killed_comes_again(tiny_text_folder: Path) -> None:
    pytest.importorskip(
        "ray.serve", reason="Ray Serve's own packages are not installed", exc_type=ImportError
    )
    params = SamplingParams(**FEW)
    with Runtime.from_pretrained(tiny_text_folder, device="cpu", compile=False) as runtime:
        right = [output.outputs[0].text for output in runtime.generate(PROMPTS, params)]
    mark, port = str(os.getpid()), str(free_port())
    given = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path))), MARK: mark}
    options = (*SMALL, "--engine", "thread", "--ray", "--port", port, "--ray-min-replicas", "2")
    with ServerProcess(tiny_text_folder, *options, environment=given) as server:
        url = server.wait_for(server.out, r"lamina: serving \S+ at (http\S+)", 300)[1]
        with httpx.Client(base_url=url, timeout=120) as client, ThreadPoolExecutor(8) as pool:

            def texts() -> list[str]:
                answers = pool.map(lambda prompt: ask(client, prompt), PROMPTS * 4)
                return [answer.json()["choices"][0]["text"] for answer in answers]

            assert texts() == right * 4
            streamed = ask(client, "hello", stream=True)
            assert streamed.headers["content-type"].startswith("text/event-stream")
            assert streamed.text.endswith("data: [DONE]\n\n")
            unknown = ask(client, "hello", model="other")
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
            before = processes(mark, "ray::ServeReplica")
            assert len(before) == 2
            os.kill(min(before), signal.SIGKILL)
            for _ in patience():
                if len(processes(mark, "ray::ServeReplica") - {min(before)}) == 2:
                    break
            for _ in patience():  # what was under way in it ends with an error
                if all(ask(client, prompt).status_code == 200 for prompt in PROMPTS):
                    break
            assert texts() == right * 4
        server.signal(signal.SIGTERM)
        assert server.process.wait(120) == 0
    for _ in patience(60):
        if not processes(mark) - {os.getpid()}:
            break
