"""A file system that knows no locks: records hold them among real processes, and end with their holders."""

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading

import pytest

from lamina.common import records, scratch
from lamina.common.collection import collect
from lamina.common.locks import hold
from lamina.common.store import Store

from ..engine_gate import comes_true

REFUSE = """
import errno, fcntl, os, sys, time
from pathlib import Path
def refuse(*_):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = refuse
from lamina.common.locks import hold
path = Path(sys.argv[1])
"""
COUNT = """
counter = path.with_name("counter")
for _ in range(40):
    with hold(path):
        number = int(counter.read_text())
        time.sleep(0.0005)
        counter.write_text(str(number + 1))
"""
HOLD = """
with hold(path):
    print("held", flush=True)
    time.sleep(1000)
"""


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def no_locks(monkeypatch, request):
    def refuse(*_):
        raise OSError(request.param, "not here")

    monkeypatch.setattr(fcntl, "flock", refuse)


def start(script, path):
    command = [sys.executable, "-c", REFUSE + script, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def is_free(path, *, shared=False):
    with hold(path, shared=shared, wait=False) as is_held:
        return is_held


def test_one_process_at_a_time_holds_it(tmp_path):
    (tmp_path / "counter").write_text("0")
    counting = [start(COUNT, tmp_path / "lock") for _ in range(4)]
    for process in counting:
        process.communicate()
    assert [process.returncode for process in counting] == [0] * 4
    assert (tmp_path / "counter").read_text() == "160"
    assert not any((tmp_path / "lock").iterdir())


def test_a_killed_holder_holds_nothing_even_before_its_parent_has_looked(tmp_path, no_locks):
    holder = start(HOLD, tmp_path / "lock")
    assert holder.stdout.readline() == "held\n"
    assert not is_free(tmp_path / "lock")
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    with hold(tmp_path / "lock") as is_held:
        assert is_held
    assert holder.wait() == -signal.SIGKILL
    holder.stdout.close()
    assert not any((tmp_path / "lock").iterdir())


def test_readers_share_it_and_a_writer_has_it_alone(tmp_path, no_locks):
    path = tmp_path / "lock"
    with hold(path, shared=True), hold(path, shared=True):
        assert is_free(path, shared=True)
        assert not is_free(path)
    with hold(path):
        assert not is_free(path, shared=True)
    assert is_free(path)


@pytest.mark.parametrize("change", [{1: "elsewhere"}, {2: "7"}], ids=["another host", "another container"])
def test_one_that_cannot_be_seen_is_waited_for_and_named(tmp_path, no_locks, caplog, change):
    path = tmp_path / "lock"
    path.mkdir()
    parts = ["alone", *records._whoami(), "0123"]
    record = path / ",".join(change.get(i, part) for i, part in enumerate(parts))
    record.touch()
    held = threading.Event()

    def wait():
        with hold(path):
            held.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert comes_true(lambda: any(f"if it has ended, remove {record}" in told for told in caplog.messages))
    assert not held.is_set()
    record.unlink()
    waiting.join()
    assert held.is_set()


@pytest.mark.parametrize("change", [{3: "another-boot"}, {5: "1"}], ids=["before the boot", "pid used again"])
def test_what_a_process_left_that_cannot_live_is_removed(tmp_path, no_locks, change):
    path = tmp_path / "lock"
    path.mkdir()
    parts = ["alone", *records._whoami(), "0123"]
    (path / ",".join(change.get(i, part) for i, part in enumerate(parts))).touch()
    assert is_free(path)
    assert not any(path.iterdir())


def test_an_error_inside_frees_it(tmp_path, no_locks):
    with contextlib.suppress(KeyboardInterrupt), hold(tmp_path / "lock"):
        raise KeyboardInterrupt
    assert is_free(tmp_path / "lock")


def test_a_cache_works_there_and_what_may_be_open_stays(tmp_path, no_locks):
    store = Store(tmp_path)
    assert store.get(store.put(b"bytes")) == b"bytes"
    with store.new_folder("converted", "key") as folder:
        (folder / "weights").write_bytes(b"0" * 10)
    (tmp_path / "temporary" / "left").mkdir()
    scratch.sweep(tmp_path / "temporary")
    assert not (tmp_path / "temporary" / "left").exists()
    collect(Store(tmp_path), max_bytes=0)
    assert (tmp_path / "folders" / "converted" / "key" / "weights").exists()


def test_a_compiler_that_locks_by_itself_works_elsewhere(tmp_path, monkeypatch):
    assert Store(tmp_path).build_folder().is_relative_to(tmp_path)
    real = fcntl.flock

    def refuse_here(descriptor, operation):
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(tmp_path)):
            raise OSError(errno.ENOLCK, "not here")
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refuse_here)
    assert not Store(tmp_path).build_folder().is_relative_to(tmp_path)
