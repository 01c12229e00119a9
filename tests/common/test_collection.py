"""A collection removes scratch first and compiled code last, meets its limit or says why not."""

import os
import subprocess
import sys

import pytest

from lamina.common.collection import collect
from lamina.common.contents import objects, total_bytes, verify
from lamina.common.errors import StoreError
from lamina.common.store import Store

MIB = 1 << 20
START = """
import sys
from lamina.common.store import Store
from lamina.common.errors import StoreError

def make(store):
    with store.using():
        digest = store.put(b"library" * 1000)
        store.write_ref("kernels", "a" * 64, {"object": digest})
        assert open(store.path(digest), "rb").read() == b"library" * 1000

def start(store):
    with store.using():
        record = store.read_ref("kernels", "a" * 64)
        if record is not None:
            try:
                path = store.path(record["object"])
            except StoreError:
                record = None
            else:
                assert open(path, "rb").read() == b"library" * 1000
    if record is None:
        make(store)
    folder = store.folder("checkpoints", "key")
    if folder is None:
        with store.lock("checkpoints-key"):  # as whoever converts has it, so that nobody else's is found
            folder = store.folder("checkpoints", "key")
            if folder is None:
                with store.new_folder("checkpoints", "key") as new:
                    (new / "weights").write_bytes(b"weights" * 1000)
                    (new / "config.json").write_bytes(b"{}")
                folder = store.folder("checkpoints", "key")
    for name in ("config.json", "weights"):
        assert open(folder / name, "rb").read()
    store.remember("serving", "b" * 64, {"kernels": ["a" * 64]})

for _ in range(int(sys.argv[2])):
    start(Store(sys.argv[1]))
"""
COLLECT = """
import os, sys
from lamina.common.collection import collect
from lamina.common.contents import entries, verify
from lamina.common.store import Store
count = 0
while not os.path.exists(sys.argv[2]):
    count += 1
    store = Store(sys.argv[1])
    collect(store, 0)
    entries(store)
print(count)
"""


@pytest.fixture
def store(tmp_path):
    """A store with a compiler's leavings, a converted model, and a plan with its kernel."""
    store = Store(tmp_path / "store")
    (store.outside_folder("inductor") / "headers").write_bytes(bytes(3 * MIB))
    with store.new_folder("checkpoints", "old") as folder:
        (folder / "weights").write_bytes(bytes(2 * MIB))
    with store.new_folder("checkpoints", "new") as folder:
        (folder / "weights").write_bytes(bytes(2 * MIB))
    for name in ("old", "new"):
        store.let_go(store.root / "folders" / "checkpoints" / name)
    os.utime(store.root / "folders" / "checkpoints" / "old", (1, 1))
    for name, size in (("first", MIB), ("second", MIB // 2)):
        store.write_ref("kernels", name, {"object": store.put(name.encode() * (size // len(name)))})
        os.utime(store.root / "refs" / "kernels" / f"{name}.json", (len(name), len(name)))
    return store


def left(store):
    """What there still is."""
    found = ["scratch"] if (store.root / "outside" / "inductor").exists() else []
    found += sorted(path.name for path in (store.root / "folders" / "checkpoints").iterdir())
    return [*found, *sorted(path.stem for path in (store.root / "refs" / "kernels").iterdir())]


def test_scratch_goes_first_then_converted_models_then_compiled_code_each_the_oldest_first(store):
    wanted = ["scratch", "new", "old", "first", "second"]
    assert left(store) == wanted
    for limit, gone in ((7, "scratch"), (4, "old"), (2, "new"), (0.7, "first"), (0, "second")):
        collected = collect(store, int(limit * MIB))
        assert collected.left_bytes == total_bytes(store) <= limit * MIB
        assert collected.reasons == ()
        wanted.remove(gone)
        assert left(store) == wanted
        assert verify(store) == []
    assert list(objects(store)) == []


def test_the_scratch_of_whoever_compiles_stays_and_that_is_said(store):
    with store.lock("compile"):
        collected = collect(Store(store.root), 0)
    assert left(store) == ["scratch"]
    (reason,) = collected.reasons
    assert reason.startswith("outside/inductor (3.0 MiB) is in use")


def test_what_is_on_its_way_to_a_name_stays_and_that_is_said(store):
    store.put(b"not named yet" * 1000)
    with store.temporary_folder() as folder:
        (folder / "half").write_bytes(bytes(MIB))
        collected = collect(store, 1000)
        assert (folder / "half").exists()
    said = " ".join(collected.reasons)
    assert "1 objects that no entry names" in said
    assert "work in progress" in said


def test_what_is_not_the_stores_is_neither_counted_nor_removed(store):
    (store.root / "models").mkdir()
    (store.root / "models" / "mine.gguf").write_bytes(bytes(MIB))
    collected = collect(store, 100_000)
    assert collected.left_bytes <= 100_000
    assert (store.root / "models" / "mine.gguf").stat().st_size == MIB


def test_nothing_is_collected_from_a_store_that_cannot_be_written(store, monkeypatch):
    monkeypatch.setattr("lamina.common.store.os.access", lambda path, mode: mode != os.W_OK | os.X_OK)
    with pytest.raises(StoreError, match="is read-only: nothing can be removed from it"):
        collect(Store(store.root), 0)


def starts_beside_collections(root, num_processes, num_starts):
    """Starts in several processes, while another one removes whatever it can without pause."""
    collecting = subprocess.Popen(
        [sys.executable, "-c", COLLECT, str(root), str(root.parent / "stop")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    starting = [
        subprocess.Popen([sys.executable, "-c", START, str(root), str(num_starts)], stderr=subprocess.PIPE)
        for _ in range(num_processes)
    ]
    errors = [process.communicate()[1].decode() for process in starting]
    (root.parent / "stop").touch()
    output, error = collecting.communicate()
    assert collecting.returncode == 0, error
    assert [process.returncode for process in starting] == [0] * num_processes, errors
    assert int(output) > 10
    assert verify(Store(root)) == []
    assert list((root / "temporary").iterdir()) == []


def test_starts_beside_collections_never_fail_and_nor_do_these(tmp_path):
    starts_beside_collections(tmp_path / "store", 4, 25)


@pytest.mark.slow
def test_a_thousand_starts_beside_collections_never_fail(tmp_path):
    starts_beside_collections(tmp_path / "store", 8, 125)
