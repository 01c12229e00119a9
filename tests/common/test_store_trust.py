"""Nothing is read that somebody else could have written, and a record serves nothing but what it is of."""

import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lamina.common import trust
from lamina.common.contents import verify
from lamina.common.errors import StoreError
from lamina.common.sealed import seal, unseal
from lamina.common.store import Store

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
OTHER = 12345  # a user id


@pytest.fixture
def store(tmp_path):
    """An empty store whose folders others may enter, as in an image."""
    (tmp_path / "store").mkdir(mode=0o755)
    return Store(tmp_path / "store")


def object_path(store, digest):
    return store.root / "objects" / digest[:2] / digest[2:]


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o2775, 0o757])
def test_what_lay_in_a_folder_that_others_could_write_is_put_aside(tmp_path, mode, caplog):
    planted = Store(tmp_path / "store")
    digest = planted.put(b"planted")
    planted.write_ref("plans", "a", {"record": digest})
    (tmp_path / "store" / "models").mkdir()
    (tmp_path / "store").chmod(mode)
    with caplog.at_level(logging.WARNING):
        store = Store(tmp_path / "store")
    assert store.root.stat().st_mode & 0o7777 & (stat.S_IWGRP | stat.S_IWOTH) == 0
    assert "now it is yours alone" in caplog.text
    assert "quarantine/" in caplog.text
    assert store.read_ref("plans", "a") is None
    with pytest.raises(StoreError, match="missing"):
        store.get(digest)
    assert store.get(store.put(b"planted")) == b"planted"
    assert (tmp_path / "store" / "models").exists()


@pytest.mark.parametrize("place", ["objects", "refs", "refs/plans", "object", "ref"])
@pytest.mark.parametrize("harm", ["mode", pytest.param("owner", marks=AS_ROOT)])
def test_nothing_below_a_place_of_others_is_read(store, place, harm, caplog):
    digest = store.put(b"content")
    store.write_ref("plans", "a", {"record": digest})
    named = {"object": object_path(store, digest), "ref": store.root / "refs" / "plans" / "a.json"}
    path = named.get(place, store.root / place)
    if harm == "mode":
        path.chmod(path.stat().st_mode | 0o022)
    else:
        os.chown(path, OTHER, -1)
    fresh = Store(store.root)
    with caplog.at_level(logging.WARNING):
        if place.startswith("obj"):
            with pytest.raises(StoreError):
                fresh.get(digest)
        else:
            assert fresh.read_ref("plans", "a") is None
    assert ("written by others" if harm == "mode" else f"belongs to user {OTHER}") in caplog.text
    assert fresh.put(b"content") == digest  # and goes on
    fresh.write_ref("plans", "a", {"record": digest})
    assert Store(store.root).get(fresh.read_ref("plans", "a")["record"]) == b"content"


@pytest.mark.parametrize("harm", ["mode", "link", "more", pytest.param("owner", marks=AS_ROOT)])
def test_a_folder_that_others_touched_is_made_again(store, tmp_path, harm):
    with store.new_folder("checkpoints", "key") as folder:
        (folder / "weights").write_bytes(b"weights")
    path = store.root / "folders" / "checkpoints" / "key"
    if harm == "mode":
        (path / "weights").chmod(0o666)
    elif harm == "owner":
        os.chown(path / "weights", OTHER, -1)
    elif harm == "link":
        (tmp_path / "elsewhere").write_bytes(b"weights")
        (path / "weights").unlink()
        (path / "weights").symlink_to(tmp_path / "elsewhere")
    else:
        (path / "tokenizer.json").write_text("{}")
    assert verify(store)
    assert Store(store.root).folder("checkpoints", "key") is None
    assert not path.exists()


def test_modes_below_a_folder_that_others_cannot_enter_do_not_matter(tmp_path):
    store = Store(tmp_path / "store")
    assert store.root.stat().st_mode & 0o777 == 0o700
    digest = store.put(b"content")
    (store.root / "objects").chmod(0o777)
    assert Store(store.root).get(digest) == b"content"


def test_links_fifos_and_folders_in_the_place_of_objects_are_not_read(store, tmp_path):
    digest = store.put(b"content")
    (tmp_path / "outside").write_bytes(b"content")
    for make in (lambda p: p.symlink_to(tmp_path / "outside"), os.mkfifo, os.mkdir):
        object_path(store, digest).unlink(missing_ok=True)
        make(object_path(store, digest))
        with pytest.raises(StoreError):
            store.get(digest)
        path = object_path(store, digest)
        if path.is_dir():
            path.rmdir()


@AS_ROOT
def test_a_folder_stays_refused_where_it_cannot_be_closed(tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)
    monkeypatch.setattr(Path, "chmod", lambda self, mode: None)  # as where modes are not kept
    with pytest.raises(StoreError, match=r"can be written by others \(mode 777\).*chmod go-w"):
        Store(tmp_path / "store")


def test_whatever_the_umask_is_nobody_else_can_write_what_is_made(tmp_path):
    script = """
import os, sys
os.umask(0)
from lamina.common.store import Store
store = Store(sys.argv[1])
store.write_ref("plans", "a", {"record": store.put(b"content")})
with store.new_folder("checkpoints", "key") as folder:
    (folder / "weights").write_bytes(b"w")
with store.lock("x"):
    pass
store.outside_folder("inductor")
"""
    (tmp_path / "store").mkdir(mode=0o755)
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "store")], check=True)
    for path in (tmp_path / "store").rglob("*"):
        assert not path.stat().st_mode & trust.OTHERS_WRITE, path
    assert Store(tmp_path / "store").folder("checkpoints", "key")


@pytest.mark.parametrize("kind, key", [("plans", "other"), ("pieces", "key")])
def test_a_record_under_another_name_is_reported_and_not_served(store, kind, key, caplog):
    store.write_ref("plans", "key", {"record": "a"})
    store.write_ref(kind, key, {"record": "b"})
    source, target = (store.root / "refs" / place for place in ("plans/key.json", f"{kind}/{key}.json"))
    target.write_bytes(source.read_bytes())
    (problem,) = verify(store)
    assert (problem.path, problem.what) == (target, "it is the record of plans/key")
    with caplog.at_level(logging.WARNING):
        assert store.read_ref(kind, key) is None
    assert "is the record of plans/key" in caplog.text
    assert store.read_ref("plans", "key") == {"record": "a"}
    assert verify(store) == []


def test_every_flipped_bit_of_a_record_is_noticed(store):
    value = {"eps": 1e-5, "name": "x", "list": [1, 2, {"a": None}]}
    data = seal("plans/key", value)
    assert unseal("plans/key", data) == value
    for place in range(len(data)):
        for bit in (1, 32):
            changed = bytearray(data)
            changed[place] ^= bit
            try:
                assert json.loads(changed) == json.loads(data)  # white space, say
            except (ValueError, AssertionError):
                with pytest.raises(ValueError, match=r"^is (no|not|the)"):
                    unseal("plans/key", bytes(changed))


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"1", b"null", b"[" * 100_000, b'{"of": 1}', b"1" * 5000, b"\xff"]
)
def test_whatever_is_no_record_is_a_miss(store, data):
    store.write_ref("plans", "key", 1)
    (store.root / "refs" / "plans" / "key.json").write_bytes(data)
    assert verify(store)
    assert store.read_ref("plans", "key") is None
    assert verify(store) == []


@pytest.mark.parametrize("name", [None, 1, [], "", "a/b", "..", "x" * 300])
def test_a_name_that_is_none_is_an_error_of_the_store(store, name):
    for ask in (
        lambda: store.read_ref(name, "a"),
        lambda: store.read_ref("a", name),
        lambda: store.get(name),
    ):
        with pytest.raises(StoreError):
            ask()
