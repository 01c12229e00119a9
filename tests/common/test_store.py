"""Files that can be trusted: whole or absent, checked when read, whoever writes, kills or damages them."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lamina.common import store as store_module
from lamina.common.errors import StoreError
from lamina.common.store import Store

WRITE_FOREVER = """
import os, sys
from lamina.common.store import Store
store = Store(sys.argv[1])
print("ready", flush=True)
number = 0
while True:
    number += 1
    digest = store.put(str(number).encode() * 20000)
    store.write_ref("numbers", str(number % 7), {"object": digest, "number": number})
"""
WRITE_SOME = """
import sys
from lamina.common.store import Store
store = Store(sys.argv[1])
for number in range(30):
    digest = store.put(str(number).encode() * 1000)
    store.write_ref("numbers", str(number), {"object": digest})
"""


@pytest.fixture
def store(tmp_path):
    """An empty store."""
    return Store(tmp_path / "store")


def start(program, *arguments, **options):
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], **options)


def object_path(store, digest):
    return store.root / "objects" / digest[:2] / digest[2:]


def test_a_new_store_is_for_its_owner_alone(store):
    assert store.root.stat().st_mode & 0o777 == 0o700


def test_what_is_put_comes_back_under_one_name_however_often(store):
    first, second = store.put(b"content"), store.put(b"content")
    assert first == second
    assert store.get(first) == b"content"
    assert not list((store.root / "temporary").iterdir())


def test_every_flipped_byte_is_noticed_and_the_object_can_be_made_again(store):
    content = bytes(range(256)) * 2
    digest = store.put(content)
    for place in range(0, len(content), 7):
        path = object_path(store, digest)
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match="damaged"):
            store.get(digest)
        assert store.put(content) == digest
        assert store.get(digest) == content


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"nonsense"])
def test_a_damaged_name_is_put_aside(store, damage):
    store.write_ref("kind", "key", {"a": 1})
    path = store.root / "refs" / "kind" / "key.json"
    path.write_bytes(damage)
    assert store.read_ref("kind", "key") is None
    assert not path.exists()
    store.write_ref("kind", "key", {"a": 2})
    assert store.read_ref("kind", "key") == {"a": 2}


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..///etc/passwd", "A" * 64, "", "a/b"])
def test_a_name_that_leads_out_of_the_store_is_refused_and_nothing_out_there_is_moved(store, name):
    outside = store.root.parent / "outside.json"
    outside.write_text("not ours")
    with pytest.raises(StoreError):
        store.get(name)
    if name != "A" * 64:
        with pytest.raises(StoreError):
            store.read_ref("plans", name)
    (store.root / "refs" / "plans").mkdir(parents=True)
    (store.root / "refs" / "plans" / "not a name.json").write_text("{")
    assert store.refs("plans") == {}
    assert outside.read_text() == "not ours"


def test_a_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    (tmp_path / "store").mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(tmp_path / "store", 12345, -1)
    else:
        monkeypatch.setattr(store_module.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreError, match=r"belongs to user \d+.*chown.*LAMINA_CACHE_DIR"):
        Store(tmp_path / "store")


def test_a_folder_that_others_can_write_becomes_the_owners_alone(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    folder.chmod(0o777)
    assert Store(folder).root.stat().st_mode & 0o777 == 0o700


def test_a_read_only_store_is_read_and_what_is_made_lies_elsewhere(tmp_path, monkeypatch):
    known = Store(tmp_path / "store").put(b"known")
    before = sorted((tmp_path / "store").rglob("*"))
    monkeypatch.setattr(store_module.os, "access", lambda path, mode: mode != os.W_OK | os.X_OK)
    store = Store(tmp_path / "store")
    assert store.get(known) == b"known"
    made = store.put(b"made")
    store.write_ref("kind", "key", {"object": made})
    with store.lock("any"), store.temporary_folder():
        pass
    assert store.get(made) == b"made"
    assert store.refs("kind") == {"key": {"object": made}}
    assert sorted((tmp_path / "store").rglob("*")) == before
    elsewhere = store.home
    del store
    assert not elsewhere.exists()


def test_a_full_disk_is_named(store, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module.os, "fsync", full)
    with pytest.raises(StoreError, match="No space left on device; make room or set cache_dir"):
        store.put(b"content")
    monkeypatch.undo()
    assert store.get(store.put(b"content")) == b"content"
    assert not list((store.root / "temporary").iterdir())


def test_a_moved_store_is_the_same_store(store, tmp_path):
    digest = store.put(b"content")
    store.write_ref("kind", "key", {"object": digest})
    shutil.move(store.root, tmp_path / "elsewhere")
    moved = Store(tmp_path / "elsewhere")
    assert moved.get(moved.read_ref("kind", "key")["object"]) == b"content"


def test_a_writer_killed_at_any_moment_leaves_nothing_that_is_half(tmp_path):
    rng, root = random.Random(5), tmp_path / "store"
    for _ in range(8):
        writer = start(WRITE_FOREVER, root, stdout=subprocess.PIPE)
        writer.stdout.readline()
        time.sleep(rng.uniform(0, 0.05))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        assert_whole(Store(root))


@pytest.mark.slow
def test_fifty_killed_writers_leave_nothing_that_is_half(tmp_path):
    rng, root = random.Random(7), tmp_path / "store"
    for _ in range(50):
        writer = start(WRITE_FOREVER, root, stdout=subprocess.PIPE)
        writer.stdout.readline()
        time.sleep(rng.uniform(0, 0.2))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        assert_whole(Store(root))


def assert_whole(store):
    for reference in store.refs("numbers").values():
        assert store.get(reference["object"]) == str(reference["number"]).encode() * 20000
    assert not (store.root / "quarantine").exists()
    assert not list((store.root / "temporary").glob("*"))


def test_eight_processes_write_the_same_things_at_once(tmp_path):
    root = tmp_path / "store"
    writers = [start(WRITE_SOME, root) for _ in range(8)]
    assert [writer.wait() for writer in writers] == [0] * 8
    store = Store(root)
    for number in range(30):
        digest = store.read_ref("numbers", str(number))["object"]
        assert store.get(digest) == str(number).encode() * 1000
    assert not list((root / "temporary").iterdir())
    assert not Path(root / "quarantine").exists()
