"""A core's process that cannot start, or whose parent ends, is an error in words and leaves nothing."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

from lamina import ClosedError, ConfigError, EngineDeadError, LoadError
from lamina.common.errors import UnknownSettingError, WireError
from lamina.runtime import child_process
from lamina.runtime.engine.core_process import ProcessCore
from lamina.runtime.protocol.core_messages import Shutdown

from .processes import SHORT, SMALL, handle_of, is_running, open_runtime, wait_until


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
            "import socket, sys; out = socket.socket(fileno=int(sys.argv[2]));"
            "out.send(bytes([5, 0, 0, 0, 0, 0, 0, 0]) + b'noise'); import time; time.sleep(600)",
            WireError,
            "frame of 5 bytes",
        ),
    ],
)
def test_a_process_that_fails_before_it_is_ready_is_an_error(own_temp, monkeypatch, program, kind, words):
    monkeypatch.setattr(child_process, "BOOT", program)
    handle = ProcessCore("nothing", {}, lambda *_: None)
    with pytest.raises(kind, match=words):
        handle.opened.result(60)
    assert not handle.status().is_alive
    gone = threading.Event()
    handle.start(lambda message: gone.set())  # late: it is told nevertheless
    assert gone.wait(60)
    handle.send(Shutdown())  # and what is sent to nobody is dropped
    handle.close()
    assert not is_running(handle.pid)


def test_where_no_process_can_be_started_the_reason_is_told(own_temp, monkeypatch):
    monkeypatch.setattr(sys, "executable", None)
    handle = ProcessCore("nothing", {}, lambda *_: None)
    with pytest.raises(EngineDeadError, match="could not be started"):
        handle.opened.result(60)
    handle.close()


def test_a_process_needs_no_temporary_folder(own_temp, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(own_temp / "nowhere"))
    monkeypatch.setattr(child_process, "BOOT", "raise SystemExit(7)")
    handle = ProcessCore("nothing", {}, lambda *_: None)
    with pytest.raises(EngineDeadError, match="exit status 7"):
        handle.opened.result(60)
    handle.close()


def test_a_progress_that_raises_ends_the_loading(tiny_text_folder, own_temp):
    def progress(stage, fraction, detail):
        raise ClosedError("enough")

    handle = ProcessCore(str(tiny_text_folder), SMALL, progress)
    with pytest.raises(ClosedError, match="enough"):
        handle.opened.result(60)
    handle.close()


SERVING = """
import asyncio, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell starts in the background
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
    wait_until(lambda: not is_running(engine))
    wait_until(lambda: not list(own_temp.iterdir()))


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
