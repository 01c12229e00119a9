"""What a store holds can be listed and checked, and old things go without taking what is still needed."""

import json
import os

import pytest

from lamina.common import collection, contents
from lamina.common.store import Store

DAY = 24 * 3600


@pytest.fixture
def store(tmp_path):
    """An empty store."""
    return Store(tmp_path / "store")


def add_plan(store, name, size, age=0.0, shared=b""):
    """A name that needs a record, which needs a piece, which needs an object of that many bytes."""
    code = store.put(name.encode() * size)
    piece = store.put(name.encode() + b"key")  # stands for a key: 64 hex digits
    store.write_ref("pieces", piece, {"source": code, **({"kernel": store.put(shared)} if shared else {})})
    record = store.put(json.dumps({"pieces": [piece]}).encode())
    store.write_ref("plans", name, {"record": record})
    old = [store.root / "refs" / "plans" / f"{name}.json", store.root / "refs" / "pieces" / f"{piece}.json"]
    for path in [*old, *contents.objects(store)]:
        when = path.stat().st_mtime - age - collection.GRACE - 1 if path in old else 1.0
        os.utime(path, (when, when))
    return code, record


def test_entries_are_listed_the_last_used_first(store):
    add_plan(store, "old", 10, age=DAY)
    add_plan(store, "new", 10)
    kinds = [(entry.kind, entry.key) for entry in contents.entries(store) if entry.kind == "plans"]
    assert kinds == [("plans", "new"), ("plans", "old")]
    assert [entry.key for entry in contents.find(store, "ne")] == ["new"]


def test_a_whole_store_has_no_problem(store):
    add_plan(store, "a", 10)
    assert contents.verify(store) == []


def test_every_kind_of_damage_is_found(store):
    code, record = add_plan(store, "a", 10)
    contents.object_path(store, code).write_bytes(b"other")
    assert [problem.what for problem in contents.verify(store)] == ["its content is not what its name says"]
    contents.object_path(store, record).unlink()
    contents.object_path(store, code).unlink()
    (store.root / "refs" / "plans" / "b.json").write_bytes(b"{")
    said = [problem.what for problem in contents.verify(store)]
    assert sum("which is not there" in what for what in said) == 2
    assert "it is no JSON" in said


def test_collecting_an_amount_that_fits_takes_only_what_nobody_needs(store):
    code, record = add_plan(store, "a", 10)
    lost = store.put(b"nobody names me")
    os.utime(contents.object_path(store, lost), (1, 1))
    fresh = store.put(b"nobody names me yet")
    collected = collection.collect(store, 10**6)
    assert collected.removed == ()
    assert not contents.object_path(store, lost).exists()
    assert all(contents.object_path(store, digest).exists() for digest in (code, record, fresh))


def test_collecting_removes_what_was_used_longest_ago_and_nothing_that_is_shared(store):
    old, _ = add_plan(store, "old", 1000, age=2 * DAY, shared=b"kernel")
    middle, _ = add_plan(store, "middle", 1000, age=DAY, shared=b"kernel")
    new, _ = add_plan(store, "new", 1000, shared=b"kernel")
    collected = collection.collect(store, 11_000)
    assert {name for name in collected.removed if name.startswith("plans")} == {"plans/old"}
    assert not contents.object_path(store, old).exists()
    assert contents.verify(store) == []
    assert store.get(middle)
    assert store.get(new)
    assert store.get(store.put(b"kernel")) == b"kernel"
    assert collected.left_bytes == contents.total_bytes(store) <= 11_000


def test_folders_are_collected_like_names(store):
    with store.new_folder("gguf", "model") as folder:
        (folder / "weights").write_bytes(bytes(5000))
    os.utime(store.folder("gguf", "model"), (1, 1))
    add_plan(store, "a", 10)
    assert collection.collect(store, 3000).removed == ("gguf/model",)
    assert store.folder("gguf", "model") is None
    assert contents.verify(store) == []
