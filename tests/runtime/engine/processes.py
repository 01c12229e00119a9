"""Runtimes in a process of their own, and what is there of processes and threads."""

import asyncio
import os
import threading
import time
from pathlib import Path

from lamina import AsyncRuntime, SamplingParams
from lamina.runtime.engine.core_process import ProcessCore

SMALL = {"compile": False, "device": "cpu", "num_kv_blocks": 96, "max_num_seqs": 8}
SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def open_runtime(folder, **settings):
    return AsyncRuntime.from_pretrained(folder, engine="process", **SMALL | settings)


def handle_of(runtime) -> ProcessCore:
    return runtime._client._handle


def is_running(pid):
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


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
