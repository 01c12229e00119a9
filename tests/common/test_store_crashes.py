"""A store after a crash at any call of the system, with a disk that is full at any call, and at random."""

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as Names
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lamina.common import scratch
from lamina.common.bundle import export_bundle, import_bundle, read_bundle
from lamina.common.collection import collect
from lamina.common.contents import objects, verify
from lamina.common.errors import StoreError
from lamina.common.store import Store

# Before each of these calls, and so after each, a process may die, or the disk may be full.
FAULTS = """
import errno, os, shutil, sys
from lamina.common.store import Store
from lamina.common.collection import collect
from lamina.common.errors import StoreError

os.fsync = lambda descriptor: None  # the machine goes on, and this is much faster
CALLS = ("open", "mkdir", "rename", "replace", "fsync", "unlink", "rmdir", "write", "link", "utime", "chmod")

def work(store):
    with store.using():
        digest = store.put(b"content" * 100)
        store.write_ref("kernels", "a" * 64, {"object": digest})
    with store.new_folder("checkpoints", "key") as folder:
        (folder / "weights").write_bytes(b"weights" * 100)
    store.remember("gguf", "b" * 32, "known")
    store.folder("checkpoints", "key")

def wrap(fault, at):
    count = 0
    def step():
        nonlocal count
        count += 1
        if count == at:
            fault()
    def wrapped(real):
        def call(*args, **options):
            step()
            return real(*args, **options)
        return call
    for name in CALLS:
        setattr(os, name, wrapped(getattr(os, name)))
    return lambda: count

def full():
    raise OSError(errno.ENOSPC, "No space left on device")
"""
CRASH = (
    FAULTS
    + """
root, at = sys.argv[1], 0
while True:
    at += 1
    shutil.rmtree(root, ignore_errors=True)
    if (child := os.fork()) == 0:
        store = Store(root)
        wrap(lambda: os._exit(9), at)
        work(store)
        collect(store, 0)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), (at, status)
    store = Store(root)
    assert not os.path.exists(root + "/temporary") or os.listdir(root + "/temporary") == [], at
    for value in store.refs("kernels").values():
        assert store.get(value["object"]) == b"content" * 100, at
    assert not os.path.exists(root + "/quarantine"), (at, os.listdir(root + "/quarantine"))
    from lamina.common.contents import verify
    assert verify(store) == [], at
    work(store)
    assert (store.folder("checkpoints", "key") / "weights").read_bytes() == b"weights" * 100
    if status == 0:
        break
print(at)
"""
)
FULL = (
    FAULTS
    + """
root, at = sys.argv[1], 0
while True:
    at += 1
    shutil.rmtree(root, ignore_errors=True)
    if (child := os.fork()) == 0:
        store = Store(root)
        calls = wrap(full, at)
        try:
            work(store)
        except StoreError as error:
            os._exit(7 if "No space left" in str(error) else 3)
        os._exit(0 if calls() < at else 8)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 7, 8), (at, status)  # all done, one error, or nothing needed what failed
    from lamina.common.contents import verify
    store = Store(root)
    assert verify(store) == [], at
    assert not os.path.exists(root + "/temporary") or os.listdir(root + "/temporary") == [], at
    work(store)
    if status == 0:
        break
print(at)
"""
)


def run(script, *arguments):
    result = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return int(result.stdout)


def test_a_crash_at_any_call_leaves_nothing_half_and_nothing_behind(tmp_path):
    assert run(CRASH, tmp_path / "store") > 50


def test_a_disk_that_is_full_at_any_call_is_one_error_or_none_and_leaves_nothing(tmp_path):
    assert run(FULL, tmp_path / "store") > 50


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_disk_that_is_really_full_is_one_error_and_a_start_reads_on(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        store = Store(disk / "store")
        digest = store.put(b"small")
        with pytest.raises(StoreError, match="No space left on device; make room"):
            store.put(os.urandom(1 << 21))
        with (
            pytest.raises(StoreError, match="No space left"),
            store.new_folder("checkpoints", "key") as folder,
        ):
            (folder / "weights").write_bytes(bytes(1 << 21))
        with pytest.raises(OSError, match="No space"):
            (disk / "rest").write_bytes(bytes(1 << 21))
        store.remember("serving", "a" * 64, {"names": "x" * 10_000})
        with store.using(), store.lock("compile"):
            assert Store(disk / "store").get(digest) == b"small"
        assert store.read_ref("serving", "a" * 64) is None
        assert verify(store) == []
        assert list((disk / "store" / "temporary").iterdir()) == []
        assert store.folder("checkpoints", "key") is None
    finally:
        subprocess.run(["umount", str(disk)], check=True)


KILLED = """
import os, sys
from lamina.common.store import Store
store = Store(sys.argv[1])
with store.new_folder("checkpoints", sys.argv[2]) as folder:
    (folder / "weights").write_bytes(bytes(4096))
    os.kill(os.getpid(), 9)
"""


class AnyOrder(RuleBasedStateMachine):
    """Whatever is done to a store in whatever order: what is named is whole, what is damaged is logged and
    made again, what is removed is gone, and nothing is left behind."""

    names = Names("names")

    @initialize(folder=st.uuids())
    def begin(self, folder):
        """Two stores, with a name's content known by its number."""
        base = scratch.plain_folder(Store.__init__.__globals__["PLAIN"]) / str(folder)
        self.stores = [Store(base / "one"), Store(base / "two")]
        self.bundle = base / "bundle"

    def content(self, number):
        return str(number).encode() * 50

    def key(self, number):
        return f"{number:064x}"

    @rule(which=st.integers(0, 1), number=st.integers(0, 4))
    def make(self, which, number):
        """An object, a name that needs it and a folder."""
        store = self.stores[which]
        with store.using():
            digest = store.put(self.content(number))
            store.write_ref("kernels", self.key(number), {"key": self.key(number), "object": digest})
        if store.folder("checkpoints", str(number)) is None:
            with store.new_folder("checkpoints", str(number)) as folder:
                (folder / "weights").write_bytes(self.content(number))

    @rule(which=st.integers(0, 1), number=st.integers(0, 4))
    def read(self, which, number):
        """What is there is right."""
        store = self.stores[which]
        record = store.read_ref("kernels", self.key(number))
        if record is not None:
            try:
                assert store.get(record["object"]) == self.content(number)
            except StoreError:
                self.make(which, number)
                assert store.get(record["object"]) == self.content(number)
        folder = store.folder("checkpoints", str(number))
        assert folder is None or (folder / "weights").read_bytes() == self.content(number)

    @rule(
        which=st.integers(0, 1),
        number=st.integers(0, 99),
        whole=st.booleans(),
        byte=st.integers(0, 9999),
        bit=st.integers(0, 7),
    )
    def damage(self, which, number, whole, byte, bit):
        """Any file, at any byte, or all of it; what is drawn never depends on what the disk holds."""
        root = self.stores[which].root
        files = [path for top in ("objects", "refs", "folders") for path in sorted((root / top).rglob("*"))]
        files = [path for path in files if path.is_file()]
        if files:
            path = files[number % len(files)]
            content = bytearray(path.read_bytes())
            if content and not whole:
                content[byte % len(content)] ^= 1 << bit
                path.write_bytes(content)
            else:
                path.unlink()

    @rule(which=st.integers(0, 1), number=st.integers(0, 4), other=st.integers(0, 4))
    def swap(self, which, number, other):
        """One name's record over another's."""
        refs = self.stores[which].root / "refs" / "kernels"
        source, target = refs / f"{self.key(number)}.json", refs / f"{self.key(other)}.json"
        if source.exists():
            target.write_bytes(source.read_bytes())

    @rule(which=st.integers(0, 1), limit=st.sampled_from([0, 500, 2000, 10**6]))
    def gc(self, which, limit):
        """A collection meets its limit or says why not."""
        collected = collect(self.stores[which], limit, now=None)
        assert collected.left_bytes <= limit or collected.reasons

    @rule(which=st.integers(0, 1))
    def travel(self, which):
        """What a bundle brings is whole where it arrives, whatever was there."""
        source, target = self.stores[which], self.stores[1 - which]
        try:
            export_bundle(source, self.bundle)
        except StoreError:
            return  # something of it is damaged
        bundle = read_bundle(self.bundle)
        import_bundle(target, bundle, None)
        for name in bundle.files:
            kind, *rest = name.split("/")
            if kind == "objects":
                target.get("".join(rest))
            else:
                assert target.read_ref(rest[0], rest[1].removesuffix(".json")) is not None

    @rule(which=st.integers(0, 1))
    def start_anew(self, which):
        """Another process."""
        self.stores[which] = Store(self.stores[which].root)

    @invariant()
    def nothing_is_left_behind(self):
        """Whoever is done has tidied up."""
        for store in getattr(self, "stores", ()):
            temporary = store.root / "temporary"
            assert not temporary.exists() or list(temporary.iterdir()) == []
            assert all(len(path.parent.name + path.name) == 64 for path in objects(store))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)


def test_what_kill_left_is_swept_whatever_its_age(tmp_path):
    for number in range(3):
        killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(number)], check=False)
        assert killed.returncode == -signal.SIGKILL
        assert len(list((tmp_path / "temporary").glob("*/content"))) == 1
    Store(tmp_path)
    assert list((tmp_path / "temporary").iterdir()) == []
