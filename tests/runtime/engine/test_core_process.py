"""A core in a process of its own answers as one in a thread does, and whatever ends either leaves nothing."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from lamina import (
    AsyncRuntime,
    ClosedError,
    ConfigError,
    EngineDeadError,
    LoadError,
    Runtime,
    SamplingParams,
    UnsupportedError,
)
from lamina.common.errors import UnknownSettingError, WireError
from lamina.runtime.engine import core_process
from lamina.runtime.engine.core_process import ProcessCore
from lamina.runtime.protocol.core_messages import Shutdown

SMALL = {"compile": False, "device": "cpu", "num_kv_blocks": 96, "max_num_seqs": 8}
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ASKED = {
    "greedy": {},
    "seeded": {"temperature": 1.3, "seed": 7, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "many": {"n": 3, "temperature": 1.0, "seed": 5, "logprobs": 1},
    "best": {"n": 1, "best_of": 3, "temperature": 1.0, "seed": 5},
    "adjusted": {
        "logit_bias": {40: 9.0, 50: -100.0},
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "bad_words": ["hello", [41]],
        "allowed_token_ids": list(range(4, 260)),
    },
    "stopped": {"stop": ["e", "\ufffd"], "include_stop_str_in_output": True},
    "stop ids": {"stop_token_ids": list(range(100, 200)), "min_tokens": 3},
    "ids alone": {"detokenize": False},
}


@pytest.fixture
def own_temp(tmp_path, monkeypatch):
    """A folder for temporary files that is to be empty after the test."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    before, alive = threads(), children()
    yield folder
    assert list(folder.iterdir()) == []
    assert threads() <= before
    assert children() <= alive


@pytest.fixture(scope="module")
def shared(tiny_text_folder):
    """One process for event loops that come and go."""
    runtime = asyncio.run(open_runtime(tiny_text_folder))
    yield runtime
    asyncio.run(runtime.close())


def open_runtime(folder, **settings):
    return AsyncRuntime.from_pretrained(folder, engine="process", **SMALL | settings)


def handle_of(runtime) -> ProcessCore:
    return runtime._client._handle


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(holds, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("lamina-core")}


def children():
    """The ids of processes that this one has started and that nobody has waited for."""
    return {pid for pid in os.listdir("/proc") if pid.isdigit() and parent_of(pid) == os.getpid()}


def parent_of(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return None


async def until(holds, seconds=60.0):
    await asyncio.to_thread(wait_until, holds, seconds)


def said(output):
    """All of an answer but who asked and when."""
    return output.prompt_token_ids, output.outputs, output.prompt_logprobs


def test_answers_are_those_of_a_thread_and_of_a_blocking_runtime(shared, tiny_text_folder):
    asked = [SamplingParams(max_tokens=16, **{"temperature": 0.0} | own) for own in ASKED.values()]
    prompts = [f"hello world {number}" for number in range(len(asked))]

    async def answers(runtime):
        generations = [runtime.generate(*each) for each in zip(prompts, asked, strict=True)]
        return [said(await generation.output()) for generation in generations]

    async def threaded():
        async with await AsyncRuntime.from_pretrained(tiny_text_folder, **SMALL) as runtime:
            return await answers(runtime)

    found = asyncio.run(answers(shared))
    with Runtime.from_pretrained(tiny_text_folder, **SMALL) as runtime:
        blocking = [said(output) for output in runtime.generate(prompts, asked)]
    for name, own, of_thread, of_blocking in zip(
        ASKED, found, asyncio.run(threaded()), blocking, strict=True
    ):
        assert own == of_thread, name
        assert own == of_blocking, name


def test_pieces_come_as_they_are_written(shared):
    async def body():
        generation = shared.generate("hello", SHORT)
        deltas = [delta async for delta in generation]
        whole = await shared.generate("hello", SHORT).output()
        assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
        assert sum((delta.token_ids for delta in deltas), ()) == whole.outputs[0].token_ids

    asyncio.run(body())


def test_figures_and_calls_cross_and_what_there_is_not_is_refused(shared):
    async def body():
        figures = await shared.stats()
        assert figures["blocks"]["total"] == SMALL["num_kv_blocks"] - 1
        assert figures["resolved"] == shared.description.settings
        assert "eagerly" in await shared.call("explain")
        with pytest.raises(UnsupportedError, match="'reboot'"):
            await shared.call("reboot")
        with pytest.raises(WireError, match="Call"):
            await shared.call("stats", object())

    asyncio.run(body())


def test_logits_processors_are_refused_by_name_and_nothing_is_queued(shared):
    async def body():
        params = SamplingParams(logits_processors=[lambda prompt, answer, logits: logits])
        with pytest.raises(UnsupportedError, match="logits_processors"):
            shared.generate("hello", params)
        assert (await shared.stats())["requests"]["waiting"] == 0

    asyncio.run(body())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_for_the_process_that_serves_do_not_end_the_engine(shared, number):
    async def body():
        before = await shared.generate("hello", SHORT).output()
        os.kill(handle_of(shared).pid, number)
        after = await shared.generate("hello", SHORT).output()
        assert said(after) == said(before)

    assert os.getsid(handle_of(shared).pid) != os.getsid(0)
    asyncio.run(body())


def test_an_engine_that_stands_still_is_not_healthy_until_it_goes_on(shared):
    async def body():
        pid = handle_of(shared).pid
        assert shared.health().ok
        os.kill(pid, signal.SIGSTOP)
        try:
            await until(lambda: not shared.health().ok, core_process.SILENT_SECONDS + 5)
            assert f"{pid} has said nothing for" in shared.health().reason
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: shared.health().ok)
        await shared.generate("hello", SHORT).output()

    asyncio.run(body())


def test_every_answer_ends_by_an_error_when_the_engine_is_killed(tiny_text_folder, own_temp):
    async def body():
        runtime = await open_runtime(tiny_text_folder)
        assert list(own_temp.iterdir()) == []  # the sockets are nowhere to be found
        pid = handle_of(runtime).pid
        begun = [runtime.generate(f"hello {number}", LONG) for number in range(24)]
        await begun[0].read()
        reading = [asyncio.create_task(generation.output()) for generation in begun]
        calling = asyncio.create_task(runtime.call("stats"))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        found = await asyncio.wait_for(asyncio.gather(*reading, calling, return_exceptions=True), 20)
        assert all("SIGKILL" in str(each) for each in found if isinstance(each, Exception))
        assert sum(isinstance(each, EngineDeadError) for each in found) > 16, found
        assert "SIGKILL" in runtime.health().reason
        assert not runtime.health().ok
        with pytest.raises(EngineDeadError, match=f"its process {pid} was ended by SIGKILL"):
            runtime.generate("hello")
        assert not is_running(pid)
        await runtime.close()
        await runtime.close()

    asyncio.run(body())


def test_an_engine_that_hangs_is_ended_by_force_on_closing(tiny_text_folder, own_temp):
    async def body():
        runtime = await open_runtime(tiny_text_folder)
        pid = handle_of(runtime).pid
        generation = runtime.generate("hello", LONG)
        os.kill(pid, signal.SIGSTOP)
        await runtime.close(timeout=0.2)
        assert not is_running(pid)
        with pytest.raises((EngineDeadError, ClosedError)):
            await generation.output()

    asyncio.run(body())


def test_a_runtime_that_is_dropped_ends_its_process(tiny_text_folder, own_temp):
    async def body():
        runtime = await open_runtime(tiny_text_folder)
        pid = handle_of(runtime).pid
        await runtime.generate("hello", SHORT).output()
        del runtime
        await until(lambda: gc.collect() >= 0 and not is_running(pid))

    before = threads()
    asyncio.run(body())
    wait_until(lambda: threads() <= before)


def test_loading_that_is_cancelled_ends_the_process(tiny_text_folder, own_temp):
    async def body():
        stages = []
        began = asyncio.Event()

        def progress(stage, fraction, detail):
            stages.append(stage)
            began.set()

        loading = asyncio.create_task(open_runtime(tiny_text_folder, progress=progress))
        await asyncio.wait_for(began.wait(), 60)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert stages

    asyncio.run(body())


@pytest.mark.parametrize(
    "settings, kind, words",
    [
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs is 0"),
        ({"no_such": 1}, UnknownSettingError, "no_such"),
        ({"tokenizer": lambda: None}, ConfigError, "cannot be sent"),
        ({"tokenizer": "/nowhere"}, LoadError, "/nowhere"),
    ],
)
def test_what_cannot_be_loaded_is_the_same_error_here(tiny_text_folder, own_temp, settings, kind, words):
    with pytest.raises(kind, match=words) as caught:
        asyncio.run(open_runtime(tiny_text_folder, **settings))
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    "program, kind, words",
    [
        ("raise SystemExit(7)", EngineDeadError, "exit status 7"),
        ("import os; os.kill(os.getpid(), 11)", EngineDeadError, "SIGSEGV"),
        ("import os; os.kill(os.getpid(), 9)", EngineDeadError, "SIGKILL, as the kernel does"),
        (
            "import sys, zmq; out = zmq.Context().socket(zmq.PUSH);"
            "out.connect(f'ipc://{sys.argv[1]}/outputs'); out.send(bytes([1, 16, 193]));"
            "import time; time.sleep(600)",
            WireError,
            "damaged",
        ),
    ],
)
def test_a_process_that_fails_before_it_is_ready_is_an_error(own_temp, monkeypatch, program, kind, words):
    monkeypatch.setattr(core_process, "BOOT", program)
    handle = ProcessCore("nothing", {}, lambda *_: None)
    with pytest.raises(kind, match=words):
        handle.opened.result(60)
    assert not handle.status().is_alive
    gone = threading.Event()
    handle.start(lambda message: gone.set())  # late: it is told nevertheless
    assert gone.wait(20)
    handle.send(Shutdown())  # and what is sent to nobody is dropped
    handle.close()
    assert not is_running(handle.pid)


def test_where_no_process_can_be_started_the_reason_is_told(own_temp, monkeypatch):
    monkeypatch.setattr(sys, "executable", None)
    handle = ProcessCore("nothing", {}, lambda *_: None)
    with pytest.raises(EngineDeadError, match="could not be started"):
        handle.opened.result(60)
    handle.close()
    monkeypatch.setattr(tempfile, "tempdir", str(own_temp / "nowhere"))
    with pytest.raises(ConfigError, match="set TMPDIR"):
        ProcessCore("nothing", {}, lambda *_: None)


def test_a_temporary_folder_of_a_long_path_is_no_obstacle(own_temp, monkeypatch):
    long = own_temp / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(core_process, "BOOT", "raise SystemExit(7)")
    handle = ProcessCore("nothing", {}, lambda *_: None)
    with pytest.raises(EngineDeadError, match="exit status 7"):
        handle.opened.result(60)
    handle.close()
    assert not os.path.exists(handle._child._folder)
    long.rmdir()


def test_a_progress_that_raises_ends_the_loading(tiny_text_folder, own_temp):
    def progress(stage, fraction, detail):
        raise ClosedError("enough")

    handle = ProcessCore(str(tiny_text_folder), SMALL, progress)
    with pytest.raises(ClosedError, match="enough"):
        handle.opened.result(60)
    handle.close()


SERVING = """
import asyncio, os, sys
from lamina import AsyncRuntime, SamplingParams

async def main():
    loading = AsyncRuntime.from_pretrained(sys.argv[1], engine="process", compile=False, device="cpu",
                                           num_kv_blocks=96)
    task = asyncio.ensure_future(loading)
    while True:
        await asyncio.sleep(0.01)
        found = [pid for pid in os.listdir("/proc") if pid.isdigit() and parent_of(pid) == os.getpid()]
        if found:
            break
    if sys.argv[2] == "early":
        print(found[0], flush=True)
    runtime = await task
    generation = runtime.generate("hello", SamplingParams(max_tokens=200, ignore_eos=True))
    await generation.read()
    assert "torch" not in sys.modules and "transformers" not in sys.modules, "imported in vain"
    print(found[0], flush=True)
    if sys.argv[2] != "leaves":
        await asyncio.sleep(600)

def parent_of(pid):
    try:
        return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    except OSError:
        return 0

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
@pytest.mark.parametrize("how", ["early", "serving"])
def test_nothing_is_left_of_a_server_that_is_ended(tiny_text_folder, own_temp, how, number):
    arguments = [sys.executable, "-c", SERVING, str(tiny_text_folder), how]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(arguments, **pipes, start_new_session=True) as process:
        engine = int(process.stdout.readline())
        assert is_running(engine)
        os.killpg(process.pid, number)  # as a terminal does
    wait_until(lambda: not is_running(engine), 20)
    wait_until(lambda: not list(own_temp.iterdir()), 20)


def test_a_program_that_ends_without_closing_takes_its_engine_along_and_never_imports_torch(
    tiny_text_folder, own_temp
):
    arguments = [sys.executable, "-c", SERVING, str(tiny_text_folder), "leaves"]
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert not is_running(int(done.stdout))


@pytest.mark.long
def test_starting_and_stopping_again_and_again_leaves_nothing(tiny_text_folder, own_temp):
    async def body():
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            async with await open_runtime(tiny_text_folder) as runtime:
                await runtime.generate("hello", SHORT).output()
            assert len(os.listdir("/proc/self/fd")) <= before + 4  # of the loop's own threads
            assert not is_running(handle_of(runtime).pid)

    asyncio.run(body())
