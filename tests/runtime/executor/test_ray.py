"""Ranks as actors on two Ray nodes: one process's tokens, errors as values, and nothing left of any."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lamina import AsyncRuntime, EngineDeadError, Runtime, SamplingParams
from lamina.common.errors import EngineError, UnsupportedError
from lamina.runtime.executor import ray_cluster, ray_workers
from lamina.runtime.executor.ray_workers import RayWorkers
from lamina.runtime.startup import engine_builder

from ...serving.server_process import LONG as LONG_OPTIONS
from ...serving.server_process import SMALL as SMALL_OPTIONS
from ...serving.server_process import ServerProcess, assert_serves_again
from ..asking import SHORT, SMALL
from ..engine.processes import is_running, wait_until
from ..parallel.test_traffic import TIGHT, answers
from . import ray_nodes

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
PROMPTS = ["Once upon a time", "The capital", "one two three one two three", "x"]
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
ROOT = Path(__file__).resolve().parents[3]
# What an actor's process runs before all else, by the name that Python looks for.
SITECUSTOMIZE = """
from lamina.custom_ops.all_reduce.group import current_group
from lamina.runtime.startup import builder
from lamina.runtime.worker import model_runner
execute, steps = model_runner.ModelRunner.execute, [0]
def faulty(self, plan):
    steps[0] += 1
    rank = current_group().rank
    FAULT
    return execute(self, plan)
model_runner.ModelRunner.execute = faulty
"""


@pytest.fixture(scope="module")
def folder_of_ray() -> Iterator[Path]:
    """Where Ray keeps its files: a short path, as its sockets lie there."""
    folder = Path(tempfile.mkdtemp(prefix="lr-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def cluster(folder_of_ray: Path) -> Iterator[str]:
    """The address of two nodes. Ray gives a start up after half a minute, so a busy machine has several."""
    for _ in range(10):
        with pytest.MonkeyPatch.context() as patch:
            set_environment(patch, folder_of_ray)
            nodes = subprocess.Popen(
                [sys.executable, ray_nodes.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert nodes.stdin is not None
        assert nodes.stdout is not None
        address = nodes.stdout.readline().strip()
        if address:
            break
        nodes.communicate()
    yield address
    nodes.communicate()
    wait_until(lambda: not processes_of(folder_of_ray), 120)
    assert nodes.returncode == 0


def set_environment(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """What Ray's processes, and those that join them, are to find."""
    patch.setenv("RAY_TMPDIR", str(folder))
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    patch.setenv("PYTHONPATH", str(ROOT / "src"))


def processes_of(folder: Path) -> list[str]:
    """The ids of processes that were started with a folder for Ray's files."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # it has ended
            continue
        if (
            f"RAY_TMPDIR={folder}".encode() in environment
            and pid != str(os.getpid())
            and is_running(int(pid))
        ):
            found.append(pid)
    return found


@pytest.fixture
def joined(cluster: str, folder_of_ray: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runtimes join the cluster."""
    set_environment(monkeypatch, folder_of_ray)
    monkeypatch.setenv("RAY_ADDRESS", cluster)


def open_runtime(folder: Path, **settings: object) -> Runtime:
    given = {"executor": "ray", "tensor_parallel": 2, "ray_placement": "strict_spread", **SMALL, **settings}
    return Runtime.from_pretrained(folder, **given)  # type: ignore[arg-type]


def with_fault(patch: pytest.MonkeyPatch, folder: Path, program: str) -> None:
    """Actors that are started from now on run a program first."""
    (folder / "sitecustomize.py").write_text(program)
    path = os.pathsep.join((str(folder), str(ROOT / "src")))
    patch.setattr(ray_cluster.RayCluster, "actor_env", lambda self: {"PYTHONPATH": path})


def test_two_nodes_give_the_tokens_of_one_process_with_steps_one_upon_another(
    tiny_text_folder: Path, joined: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**TIGHT, "speculative": "ngram:3"}
    expected, preempted = answers(tiny_text_folder, 2, **settings)
    assert preempted > 0
    monkeypatch.setitem(engine_builder.DEPTHS, "cpu", 2)
    spread = {"executor": "ray", "tensor_parallel": 2, "ray_placement": "strict_spread"}
    found, preempted = answers(tiny_text_folder, 2, **settings, **spread)
    assert preempted > 0
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    assert [one[2] for one in found] == pytest.approx([one[2] for one in expected], rel=1e-6, abs=1e-6)


def test_stages_on_two_nodes_have_the_tokens_of_one_process(tiny_text_folder: Path, joined: None) -> None:
    expected, _ = answers(tiny_text_folder, 2, **TIGHT)
    spread = {"executor": "ray", "tensor_parallel": 2, "pipeline_parallel": 2}  # four ranks on two nodes:
    found, _ = answers(tiny_text_folder, 2, **TIGHT, **spread, ray_placement="strict_spread")
    assert [one[:2] for one in found] == [one[:2] for one in expected]


def test_a_killed_actor_ends_every_request_and_the_next_start_works(
    tiny_text_folder: Path, cluster: str, joined: None
) -> None:
    import ray
    from ray.util.placement_group import placement_group_table

    ray.init(address=cluster, logging_level=40)  # what this process has joined itself stays joined
    try:
        whole = ray.available_resources()
        with open_runtime(tiny_text_folder) as runtime:
            groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
            assert len(set(groups[0]["bundles_to_node_id"].values())) == 2
            wanted = runtime.generate(PROMPTS[0], SHORT)[0].outputs[0].token_ids
            assert runtime._loaded.executor.collective_rpc("note_use") == [None, None]
            with pytest.raises(UnsupportedError, match="no_such") as caught:
                runtime._loaded.executor.collective_rpc("no_such")
            assert "on rank 0:\nTraceback" in "".join(caught.value.__notes__)
            assert_dies(runtime, rank=1)
            with pytest.raises(EngineDeadError, match="rank 1"):  # at once, for who comes later
                runtime.generate("x", SHORT)
            wait_until(lambda: ray.available_resources().get("CPU") == whole["CPU"], 120)
            assert all(group["state"] == "REMOVED" for group in placement_group_table().values())
        with open_runtime(tiny_text_folder) as runtime:
            pids = runtime._loaded.executor.pids
            assert runtime.generate(PROMPTS[0], SHORT)[0].outputs[0].token_ids == wanted
        wait_until(lambda: not any(map(is_running, pids)), 120)
        assert ray.is_initialized()
    finally:
        ray.shutdown()


def test_engines_share_a_cluster_and_one_that_loses_an_actor_comes_again(
    tiny_text_folder: Path, folder_of_ray: Path, joined: None
) -> None:
    with Runtime.from_pretrained(tiny_text_folder, **SMALL) as runtime:
        wanted = [output.outputs[0].token_ids for output in runtime.generate(PROMPTS, SHORT)]
    settings = {**SMALL, "executor": "ray", "tensor_parallel": 2, "data_parallel": 2}

    async def answers(runtime: AsyncRuntime) -> list[tuple[int, ...]]:
        outputs = await asyncio.gather(*(runtime.generate(each, SHORT).output() for each in PROMPTS))
        return [output.outputs[0].token_ids for output in outputs]

    def are_serving(runtime: AsyncRuntime) -> bool:
        return all(engine.state == "serving" for engine in runtime.engines())

    async def body() -> None:
        async with await AsyncRuntime.from_pretrained(
            tiny_text_folder, engine="process", **settings
        ) as runtime:
            assert await answers(runtime) == wanted
            assert all(engine.num_given for engine in runtime.engines())
            os.kill(actors_of(folder_of_ray)[0], signal.SIGKILL)
            while are_serving(runtime):  # an engine without requests learns of it with the next one
                asked = (runtime.generate(each, SHORT).output() for each in PROMPTS)
                await asyncio.gather(*asked, return_exceptions=True)
            assert await answers(runtime) == wanted  # by the other one
            while not are_serving(runtime):
                await asyncio.sleep(0.05)
            assert await answers(runtime) == wanted
        wait_until(lambda: not actors_of(folder_of_ray), 120)

    asyncio.run(asyncio.wait_for(body(), 600))


def assert_dies(runtime: Runtime, *, rank: int) -> None:
    """Every request ends once a worker has, with an error that says which worker it was."""
    pids, ended, begun = runtime._loaded.executor.pids, [], threading.Semaphore(0)

    def ask(prompt: str) -> None:
        try:
            for number, _ in enumerate(runtime.stream(prompt, LONG)):
                if number == 0:
                    begun.release()
        except EngineDeadError as error:
            ended.append(str(error))

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=300)
    os.kill(pids[rank], signal.SIGKILL)
    for thread in threads:
        thread.join(300)
    assert len(ended) == len(PROMPTS)
    assert all(f"rank {rank}: its actor, process {pids[rank]} on " in words for words in ended)
    wait_until(lambda: not any(map(is_running, pids)), 120)
    assert runtime._loaded.core.stats()["requests"]["running"] == 0


def test_a_step_that_fails_is_tried_again_and_one_that_fails_on_a_rank_alone_ends_all(
    tiny_text_folder: Path, joined: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = """if steps[0] in (3, 4): raise ValueError(f'step {steps[0]} is broken')
    if rank == 1 and steps[0] > 60: raise ValueError('only here')"""
    with_fault(monkeypatch, tmp_path, SITECUSTOMIZE.replace("FAULT", fault))
    with open_runtime(tiny_text_folder) as runtime:
        pids = runtime._loaded.executor.pids
        assert len(runtime.generate(PROMPTS[0], SHORT)[0].outputs[0].token_ids) == SHORT.max_tokens
        with pytest.raises(EngineDeadError, match=r"failed on rank 1 and not on all .*only here") as caught:
            runtime.generate(PROMPTS, LONG)
        assert "in faulty" in str(caught.value)
    wait_until(lambda: not any(map(is_running, pids)), 120)


def test_what_cannot_be_loaded_or_started_is_an_error_here(
    tiny_text_folder: Path, joined: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(monkeypatch, tmp_path, SITECUSTOMIZE.replace("FAULT", "0") + "builder.build_worker = None")
    with pytest.raises(EngineError, match="'NoneType' object is not callable"):
        open_runtime(tiny_text_folder, tensor_parallel=1)
    with_fault(monkeypatch, tmp_path, "import lamina; lamina.__version__ = '0.0'")
    with pytest.raises(EngineError, match=r"Lamina 0\.0 is installed on .* wanted the same version"):
        open_runtime(tiny_text_folder, tensor_parallel=1)


def test_what_no_node_has_room_for_is_said(joined: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers, "SECONDS_TO_PLACE", 1.0)
    needs = {"num_cpus": ray_nodes.NUM_CPUS, "num_gpus": 0}
    with pytest.raises(
        EngineDeadError, match=r"no room .* for 2 x {'CPU': 8}, placed STRICT_PACK, .* CPU 8 "
    ):
        RayWorkers(2, print, placement="strict_pack", **needs)
    assert not ray_workers._running


PROGRAM = """
import os, signal, sys, lamina
from lamina import Runtime, SamplingParams
before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
runtime = Runtime.from_pretrained(sys.argv[1], executor="ray", **{settings!r})
assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
runtime.generate("x", SamplingParams(max_tokens=4))
print(*runtime._loaded.executor.pids, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
runtime.close()
"""


def run_alone(folder: Path, end: str) -> int:
    """The id of the worker of a runtime in a process that has ended since."""
    program = PROGRAM.replace("{settings!r}", repr(SMALL))
    command = [sys.executable, "-c", program, str(folder), end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == (0 if end == "closed" else -signal.SIGKILL), done.stderr
    return int(done.stdout)


def test_actors_end_with_the_process_that_started_them(tiny_text_folder: Path, joined: None) -> None:
    pid = run_alone(tiny_text_folder, "killed")
    wait_until(lambda: not is_running(pid), 120)


def test_a_server_loads_again_what_the_end_of_an_actor_has_ended(
    tiny_text_folder: Path, joined: None, folder_of_ray: Path
) -> None:
    environment = {name: os.environ[name] for name in os.environ if name.startswith("RAY_")}
    options = (*SMALL_OPTIONS, *LONG_OPTIONS, "--executor", "ray", "--max-restarts", "1")
    with ServerProcess(tiny_text_folder, *options, environment=environment) as server:
        server.wait_for(server.out, "lamina: serving", 600)
        stream = server.stream(20_000)
        server.wait_streaming(1)
        (actor,) = actors_of(folder_of_ray)
        os.kill(actor, signal.SIGKILL)
        assert stream.result(300).events[-1]["error"]["message"] == "the engine is lost"
        server.wait_for(server.errors, f"the engine is lost: .* its actor, process {actor} on ")
        assert_serves_again(server)
        server.signal(signal.SIGTERM)
        assert server.code(300) == 0
    wait_until(lambda: not actors_of(folder_of_ray), 120)


def actors_of(folder: Path) -> list[int]:
    """The ids of actors' processes, which Ray names after their class."""
    ranks = []
    for pid in processes_of(folder):
        with suppress(OSError):  # it has ended
            if b"RankActor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                ranks.append(int(pid))
    return ranks


def test_a_cluster_of_its_own_ends_with_the_runtime(
    tiny_text_folder: Path, folder_of_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = folder_of_ray / "own"
    own.mkdir()
    set_environment(monkeypatch, own)
    monkeypatch.setenv("TMPDIR", str(own))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run_alone(tiny_text_folder, "closed")
    assert os.listdir(own) == []
    wait_until(lambda: not processes_of(own), 120)
