"""Bundles: the same bytes for the same things, refused when changed, and never trusted by accident."""

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.common.audit import audit
from lamina.common.bundle import Imported, export_bundle, import_bundle, read_bundle
from lamina.common.contents import verify
from lamina.common.errors import StoreError
from lamina.common.signature import Signer, is_signed, read_public_key
from lamina.common.store import Store

PLAN, PIECE, KERNEL, SERVING = ("a" * 64, "b" * 64, "c" * 64, "d" * 64)


@pytest.fixture
def store(tmp_path):
    """A store with a plan, a piece, a kernel, a Triton kernel and a warm-up, and things of this machine."""
    return fill(Store(tmp_path / "store"), seconds=1.5)


def fill(store, seconds):
    piece = {"source": store.put(b"def call(): pass"), "seconds": seconds}
    store.write_ref("pieces", PIECE, piece)
    store.write_ref("plans", PLAN, {"record": store.put(json.dumps({"pieces": [PIECE]}).encode())})
    store.write_ref("kernels", KERNEL, {"object": store.put(b"\x7fELF"), "op": "norm"})
    store.write_ref("serving", SERVING, {"plan": PLAN, "kernels": [KERNEL], "triton": ["KEY"]})
    store.write_ref("gguf", "e" * 32, "of this machine alone")
    folder = store.outside_folder("triton") / "KEY"
    folder.mkdir(exist_ok=True)
    (folder / "k.cubin").write_bytes(b"cubin")
    (folder / "k.ttir").write_bytes(b"not needed to run it")
    group = {"child_paths": {"k.cubin": str(folder / "k.cubin")}}
    (folder / "__grp__k.json").write_text(json.dumps(group))
    return store


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Two pairs of files with a private and a public key."""
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    folder, pairs = tmp_path_factory.mktemp("keys"), []
    for number in range(2):
        key, paths = Ed25519PrivateKey.generate(), (folder / f"{number}.pem", folder / f"{number}.pub")
        pem = serialization.Encoding.PEM
        secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        paths[0].write_bytes(key.private_bytes(pem, *secret))
        public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
        paths[1].write_bytes(public)
        pairs.append(paths)
    return pairs


def test_equal_stores_give_equal_bytes_wherever_they_lie(store, tmp_path):
    other = fill(Store(tmp_path / "another" / "place"), seconds=9.0)
    for name, one in (("first", store), ("second", other)):
        export_bundle(one, tmp_path / name)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    assert str(tmp_path).encode() not in (tmp_path / "first").read_bytes()
    assert b"of this machine" not in (tmp_path / "first").read_bytes()


def test_what_is_exported_comes_back_whole_elsewhere(store, tmp_path):
    count = export_bundle(store, tmp_path / "bundle")
    bundle, other = read_bundle(tmp_path / "bundle"), Store(tmp_path / "other")
    assert import_bundle(other, bundle, None) == Imported(num_new=9, num_healed=0)
    assert import_bundle(other, bundle, None) == Imported(num_new=0, num_healed=0)
    assert count == 9
    assert verify(other) == []
    for kind in ("plans", "pieces", "kernels", "serving"):
        assert set(other.refs(kind)) == set(store.refs(kind))
    assert (other.root / "outside" / "triton" / "KEY" / "k.cubin").read_bytes() == b"cubin"
    assert audit(other) == [f"9 files came from the bundle {bundle.digest[:16]}, which nobody signed"]


def test_a_key_exports_only_what_it_needs(store, tmp_path):
    assert export_bundle(store, tmp_path / "bundle", [PLAN[:10]]) == 4
    with pytest.raises(StoreError, match="no key in the cache begins with 'f00'; see `lamina cache list`"):
        export_bundle(store, tmp_path / "bundle", ["f00"])


def test_a_bundle_that_cannot_be_written_is_an_error_and_leaves_nothing(store, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "folder", tmp_path / "missing" / "bundle"):
        with pytest.raises(StoreError, match="cannot be written"):
            export_bundle(store, target)
    export_bundle(store, tmp_path / "bundle")
    before = (tmp_path / "bundle").read_bytes()
    store.put(b"more")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    with pytest.raises(StoreError, match="No space left"):
        export_bundle(store, tmp_path / "bundle")
    assert (tmp_path / "bundle").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} >= {"bundle", "folder"}
    assert not list(tmp_path.glob("*.part"))


def test_a_signature_holds_for_its_key_and_its_content_alone(store, tmp_path, keys):
    (private, public), (_, other) = keys
    for name in ("first", "second"):
        export_bundle(store, tmp_path / name, sign=Signer(private))
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    bundle = read_bundle(tmp_path / "first")
    signature = bundle.signature["signature"]
    assert is_signed(bundle.manifest, signature, read_public_key(public))
    assert not is_signed(bundle.manifest, signature, read_public_key(other))
    assert not is_signed(bundle.manifest + b" ", signature, read_public_key(public))
    assert not is_signed(bundle.manifest, "", read_public_key(public))
    with pytest.raises(StoreError, match=r"cannot be read as a private key.*wanted PEM"):
        Signer(public)


def test_every_changed_byte_of_a_file_is_refused(store, tmp_path):
    export_bundle(store, tmp_path / "bundle")
    data = (tmp_path / "bundle").read_bytes()
    for content in (b"def call(): pass", b"\x7fELF", b"cubin", b'"format"'):
        changed = bytearray(data)
        changed[data.index(content) + 3] ^= 1
        (tmp_path / "changed").write_bytes(changed)
        with pytest.raises(StoreError, match=r"damaged|manifest|no place"):
            import_bundle(Store(tmp_path / "other"), read_bundle(tmp_path / "changed"), None)
    for length in (0, 100, len(data) // 2):
        (tmp_path / "changed").write_bytes(data[:length])
        with pytest.raises(StoreError):
            read_bundle(tmp_path / "changed")


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "/etc/evil",
        "refs/plans/../../evil.json",
        "refs/gguf/" + "a" * 64 + ".json",
        "outside/x/A/b",
        "outside/triton/A/..",
    ],
)
def test_a_file_that_has_no_place_in_a_cache_is_refused(tmp_path, name):
    with pytest.raises(StoreError, match="which has no place in a cache"):
        read_bundle(bundle_of(tmp_path / "bundle", name, b"evil"))


@pytest.mark.parametrize("data", [b"", b"nonsense", b"[]", b"\xff"])
def test_a_record_that_is_none_is_refused(tmp_path, data):
    with pytest.raises(StoreError, match="is damaged"):
        read_bundle(bundle_of(tmp_path / "bundle", f"refs/plans/{'a' * 64}.json", data))


def bundle_of(path, name, data):
    """A bundle of one file, with a manifest that is right about it."""
    manifest = {"format": 2, "files": {name: hashlib.sha256(data).hexdigest()}}
    with tarfile.open(path, "w") as archive:
        for member, content in (("manifest.json", json.dumps(manifest).encode()), (name, data)):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_an_audit_asks_about_rights_foreign_files_and_pickles(store):
    assert audit(store) == []
    digest = store.put(b"\x80\x04 a pickle")
    (store.root / "notes.txt").write_text("mine")
    (store.root / "objects" / "odd").write_text("not named by its content")
    (store.root / "refs").chmod(0o777)
    said = " ".join(audit(store))
    for part in (digest[2:10], "begins like a pickle", "notes.txt is no file of", "odd is no object"):
        assert part in said
    assert "refs can be written by others" in said
    shutil.rmtree(store.root)


def test_an_import_heals_what_is_damaged_and_says_how_much(store, tmp_path):
    export_bundle(store, tmp_path / "bundle")
    bundle, other = read_bundle(tmp_path / "bundle"), Store(tmp_path / "other")
    import_bundle(other, bundle, None)
    for path in [*(other.root / "objects").rglob("?" * 62), *(other.root / "refs").glob("plans/*")]:
        path.write_bytes(b"damaged")
    (other.root / "outside" / "triton" / "KEY" / "k.cubin").write_bytes(b"damaged")
    assert import_bundle(other, bundle, None) == Imported(num_new=0, num_healed=5)
    assert verify(other) == []
    assert (other.root / "outside" / "triton" / "KEY" / "k.cubin").read_bytes() == b"cubin"


def test_measurements_travel_with_the_warm_up_that_used_them(store, tmp_path):
    warm_up, used, other = "1" * 64, "2" * 64, "3" * 64
    store.write_ref("measurements", used, {"gpu": "this", "entries": []})
    store.write_ref("measurements", other, {"gpu": "that", "entries": []})
    store.write_ref("serving", warm_up, {"plan": None, "kernels": [], "measurements": [used]})
    export_bundle(store, tmp_path / "bundle", [warm_up])
    import_bundle(Store(tmp_path / "other"), read_bundle(tmp_path / "bundle"), None)
    assert set(Store(tmp_path / "other").refs("measurements")) == {used}


def test_a_signed_import_leaves_a_store_that_verifies(store, tmp_path, keys):
    (private, public), _ = keys
    export_bundle(store, tmp_path / "bundle", sign=Signer(private))
    other = Store(tmp_path / "other")
    import_bundle(other, read_bundle(tmp_path / "bundle"), read_public_key(public))
    assert verify(other) == []
    assert audit(other) == []


def test_nothing_is_imported_into_a_store_that_cannot_be_written(store, tmp_path, monkeypatch):
    export_bundle(store, tmp_path / "bundle")
    bundle = read_bundle(tmp_path / "bundle")
    monkeypatch.setattr("lamina.common.store.os.access", lambda path, mode: mode != os.W_OK | os.X_OK)
    with pytest.raises(StoreError, match="is read-only: nothing was imported"):
        import_bundle(Store(tmp_path / "other"), bundle, None)


def sparse(path):
    """A member of 64 GiB that is a hole, in a kilobyte and a half."""
    info = tarfile.TarInfo("manifest.json")
    info.size, info.type = 64 << 30, tarfile.GNUTYPE_SPARSE
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))


def claims_too_much(path):
    """A plain member whose header says more than the file has."""
    info = tarfile.TarInfo("manifest.json")
    info.size = 64 << 30
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))


def negative(path):
    """A member of a negative size, which would lead backwards."""
    info = tarfile.TarInfo("manifest.json")
    info.size = -512
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))


def twice(path):
    """A name that is there twice."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for content in (b'{"format": 2, "files": {}}', b"{}"):
            info = tarfile.TarInfo("manifest.json")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def linked(path):
    """A link to a file of the machine."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        info = tarfile.TarInfo("manifest.json")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)


@pytest.mark.parametrize("make", [sparse, claims_too_much, negative, twice, linked])
def test_a_hostile_archive_is_one_error_and_takes_no_memory(tmp_path, make):
    make(tmp_path / "bundle")
    with pytest.raises(StoreError, match="no bundle of Lamina, or a damaged one"):
        read_bundle(tmp_path / "bundle")


HOSTILE = [b"[" * 100_000, b'{"a":' * 100_000, b"null", b"[]", b"1", b'"x"', b"{}", b"\xff", b"1" * 5000, b""]
TABLES = ["1", "[]", "null", '"x"', '{"a": 1}', '{"a": null}', '{"a": ["b"]}', '{"objects/x": {}}']


@pytest.mark.parametrize(
    "manifest", [*HOSTILE, *(f'{{"format": 2, "files": {table}}}'.encode() for table in TABLES)]
)
def test_a_hostile_manifest_is_one_error(tmp_path, manifest):
    with pytest.raises(StoreError):
        read_bundle(archive_of(tmp_path / "bundle", {"manifest.json": manifest}))


@pytest.mark.parametrize("signature", [*HOSTILE[:-4], b'{"signature": 1}', b'{"signature": ["a"]}'])
def test_a_hostile_signature_is_one_error(tmp_path, signature):
    files = {"manifest.json": b'{"format": 2, "files": {}}', "signature.json": signature}
    with pytest.raises(StoreError):
        read_bundle(archive_of(tmp_path / "bundle", files))


@pytest.mark.parametrize("signature", ["", "zz", "é" * 64, "00" * 64, "0" * 10_001])
def test_whatever_is_no_signature_signs_nothing(keys, signature):
    assert not is_signed(b"manifest", signature, read_public_key(keys[0][1]))


@given(data=st.binary(max_size=3000), place=st.integers(0, 5000))
def test_whatever_bytes_stand_in_a_bundle_our_error_alone_is_raised(tmp_path_factory, data, place):
    folder = tmp_path_factory.mktemp("hostile")
    good = archive_of(
        folder / "good", {"manifest.json": b'{"format": 2, "files": {}}', "signature.json": b"{}"}
    ).read_bytes()
    (folder / "bundle").write_bytes(good[:place] + data + good[place + len(data) :])
    with contextlib.suppress(StoreError):
        read_bundle(folder / "bundle")


def archive_of(path, files):
    """An archive of these files and nothing else."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path
