"""Folders of the store: sealed, checked whole when they are asked for, and never half there."""

import logging
import os
import signal
import subprocess
import sys
import threading

import pytest

from lamina.common.collection import collect
from lamina.common.contents import verify
from lamina.common.errors import StoreError
from lamina.common.store import Store

HOLD = """
import sys
from lamina.common.store import Store
store = Store(sys.argv[1])
if sys.argv[2] == "folder":
    assert store.folder("checkpoints", "key")
    print("ready", flush=True)
    sys.stdin.read()
with store.new_folder("checkpoints", "other") as folder:
    (folder / "weights").write_bytes(bytes(1 << 20))
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def store(tmp_path):
    """A store with one folder."""
    store = Store(tmp_path / "store")
    with store.new_folder("checkpoints", "key") as folder:
        (folder / "config.json").write_text("{}")
        (folder / "weights").write_bytes(bytes(range(256)) * 5000)
    return store


def start(store, what):
    """A process that has a folder open, or is writing one."""
    command = [sys.executable, "-c", HOLD, str(store.root), what]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.parametrize("place", [0, 1000, 640_000, 1_279_999])
def test_a_flipped_bit_anywhere_is_reported_and_the_folder_is_gone(store, place, caplog):
    path = store.root / "folders" / "checkpoints" / "key"
    facts = (path / "weights").stat()
    with open(path / "weights", "r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 4]))
    os.utime(path / "weights", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    (problem,) = verify(store)
    assert (problem.path, problem.what) == (path, "weights is not what was written")
    with caplog.at_level(logging.WARNING):
        assert Store(store.root).folder("checkpoints", "key") is None
    assert "weights is not what was written" in caplog.text
    assert not path.exists()
    assert verify(store) == []


@pytest.mark.parametrize("file", ["weights", "config.json", "manifest.json"])
@pytest.mark.parametrize("how", ["lost", "cut", "other"])
def test_whatever_is_done_to_a_file_is_noticed(store, file, how):
    path = store.root / "folders" / "checkpoints" / "key" / file
    if how == "lost":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if how == "cut" else b"{}" * 9)
    assert verify(store)
    assert Store(store.root).folder("checkpoints", "key") is None


def test_a_folder_moved_to_another_key_is_not_served(store):
    folder = store.root / "folders" / "checkpoints"
    os.rename(folder / "key", folder / "other")
    assert store.folder("checkpoints", "other") is None


def test_a_folder_in_use_is_not_collected_and_the_reason_said(store):
    process = start(store, "folder")
    collected = collect(store, 0)
    assert collected.removed == ()
    assert any("checkpoints/key" in reason and "in use" in reason for reason in collected.reasons)
    process.communicate()
    collected = collect(store, 0)
    assert "checkpoints/key" in collected.removed


def test_what_a_killed_writer_left_is_swept_by_the_next_start_and_that_of_a_living_one_stays(store):
    living, killed = start(store, "new"), start(store, "new")
    assert len(list((store.root / "temporary").glob("*/content"))) == 2
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    Store(store.root)
    assert len(list((store.root / "temporary").glob("*/content"))) == 1
    living.communicate()
    assert living.returncode == 0
    assert list((store.root / "temporary").iterdir()) == []
    assert Store(store.root).folder("checkpoints", "other")


def test_many_writers_of_one_folder_at_once_all_have_it(tmp_path):
    stores, failures = [Store(tmp_path / "store") for _ in range(8)], []
    barrier = threading.Barrier(len(stores))

    def write(store):
        barrier.wait()
        try:
            with store.new_folder("checkpoints", "key") as folder:
                (folder / "weights").write_bytes(b"weights")
            assert (store.folder("checkpoints", "key") / "weights").read_bytes() == b"weights"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert list((tmp_path / "store" / "temporary").iterdir()) == []


def test_a_block_that_fails_leaves_nothing(store):
    with pytest.raises(ZeroDivisionError), store.new_folder("checkpoints", "other") as folder:
        raise ZeroDivisionError(folder)
    with pytest.raises(StoreError, match="cannot be written"), store.new_folder("checkpoints", "other"):
        raise OSError(28, "No space left on device")
    assert store.folder("checkpoints", "other") is None
    assert list((store.root / "temporary").iterdir()) == []
