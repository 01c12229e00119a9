"""Compiled things of a store in one file: the same bytes for the same things, signed or trusted by hand."""

import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .contents import Entry, closure, entries
from .errors import StoreError
from .store import Store

FORMAT = 1
KINDS = ("plans", "pieces", "kernels", "serving")  # of names that mean the same on every machine
TRITON = "outside/triton"
MANIFEST, SIGNATURE = "manifest.json", "signature.json"
ALLOWED = re.compile(
    rf"objects/[0-9a-f]{{2}}/[0-9a-f]{{62}}|refs/({'|'.join(KINDS)})/[0-9a-f]{{64}}\.json"
    rf"|{TRITON}/[A-Z0-9]+/\w[\w.+-]*"
)
BUNDLES = "bundles"  # the store's names for what was imported
LOCAL_FACTS = ("seconds",)  # of a record: what differs from one making of the same thing to the next

Sign = Callable[[bytes], tuple[str, str]]  # bytes to public key and signature, in hex


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A bundle that was read: its files by name, all as the manifest says, and who signed the manifest."""

    files: Mapping[str, bytes]
    manifest: bytes
    signature: Mapping[str, str] | None  # public_key and signature, not checked yet

    @property
    def digest(self) -> str:
        """The name of a bundle: the hash of its manifest."""
        return hashlib.sha256(self.manifest).hexdigest()


def export_bundle(store: Store, target: Path, starts: Iterable[str] = (), sign: Sign | None = None) -> int:
    """Write what the keys that begin so need, or everything, to one file; the number of its files.

    Raises StoreError where a key names nothing, a file is damaged, or the target cannot be written.
    """
    known = [entry for entry in entries(store) if entry.kind in KINDS]
    files = _files(store, _chosen(known, tuple(starts)), known)
    manifest = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    text = json.dumps({"format": FORMAT, "files": manifest}, indent=1, sort_keys=True).encode()
    signature: dict[str, bytes] = {}
    if sign is not None:
        public_key, signed = sign(text)
        record = {"algorithm": "ed25519", "public_key": public_key, "signature": signed}
        signature[SIGNATURE] = json.dumps(record, indent=1, sort_keys=True).encode()
    _write(target, {MANIFEST: text, **signature, **dict(sorted(files.items()))})
    return len(files)


def _write(target: Path, members: Mapping[str, bytes]) -> None:
    """The archive, which is there whole or not at all."""
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with tarfile.open(part, "w", format=tarfile.USTAR_FORMAT) as archive:
            for name, data in members.items():
                member = tarfile.TarInfo(name)  # of no time and no owner
                member.size, member.mode = len(data), 0o600
                archive.addfile(member, io.BytesIO(data))
        os.replace(part, target)
    except OSError as error:
        raise StoreError(f"the bundle {target} cannot be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def read_bundle(path: Path) -> Bundle:
    """A bundle's content, each file checked against the manifest; StoreError for anything else."""
    try:
        with tarfile.open(path, "r:") as archive:
            members = [member for member in archive.getmembers() if member.isfile()]
            contents = {member.name: _read(archive, member) for member in members}
        manifest = contents.pop(MANIFEST)
        signature = contents.pop(SIGNATURE, None)
        stated = dict(json.loads(manifest)["files"]) if json.loads(manifest)["format"] == FORMAT else {}
        signed = None if signature is None else dict(json.loads(signature))
    except (OSError, tarfile.TarError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} is no bundle of Lamina, or a damaged one: {error}") from error
    if stated.keys() != contents.keys():
        raise StoreError(f"{path} holds other files than its manifest says")
    for name, data in contents.items():
        _check_file(path, name, data, stated[name])
    return Bundle(files=contents, manifest=manifest, signature=signed)


def import_bundle(store: Store, bundle: Bundle, signer: str | None) -> int:
    """Put a bundle's files into the store, apart from those that are there; the number of new ones.

    Whoever calls this has decided to trust the bundle: what is imported is code. signer is the public key
    that was verified, None where nothing was.
    """
    new = 0
    for name, data in sorted(bundle.files.items()):  # objects before the names that need them
        if not (store.root / name).exists():
            _place(store, name, data)
            new += 1
    record = {"signer": signer, "files": sorted(bundle.files)}
    store.write_ref(BUNDLES, bundle.digest, record)
    return new


def _place(store: Store, name: str, data: bytes) -> None:
    kind, *rest = name.split("/")
    if kind == "objects":
        store.put(data)
    elif kind == "refs":
        store.write_ref(rest[0], rest[1].removesuffix(".json"), json.loads(data))
    else:
        target = store.outside_folder(rest[0]) / rest[1] / rest[2]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def _chosen(known: list[Entry], starts: tuple[str, ...]) -> list[Entry]:
    for start in starts:
        if not any(entry.key.startswith(start) for entry in known):
            raise StoreError(f"no key in the cache begins with {start!r}; see `lamina cache list`")
    return [entry for entry in known if not starts or entry.key.startswith(starts)]


def _files(store: Store, chosen: list[Entry], known: list[Entry]) -> dict[str, bytes]:
    """What is needed, by its name in the store."""
    files = {}
    for path in closure(store, chosen, known):
        name = path.relative_to(store.root).as_posix()
        if name.startswith("refs/"):
            files[name] = _portable(json.loads(path.read_bytes()))
        else:
            files[name] = store.get(path.parent.name + path.name)
    keys = {key for entry in chosen if entry.kind == "serving" for key in entry.value.get("triton", ())}
    for folder in sorted(store.root / TRITON / key for key in keys):
        for path in folder.glob("*"):
            if path.is_file() and (path.suffix in (".cubin", ".json", ".so")):
                files[path.relative_to(store.root).as_posix()] = _triton_file(path)
    return files


def _portable(value: Any) -> bytes:
    """A record without what differs from one making to the next."""
    kept = {name: item for name, item in value.items() if name not in LOCAL_FACTS}
    return json.dumps(kept, indent=1, sort_keys=True).encode()


def _triton_file(path: Path) -> bytes:
    """A file of Triton's; its lists of files hold full paths, which are names alone in a bundle."""
    if not path.name.startswith("__grp__"):
        return path.read_bytes()
    names = sorted(json.loads(path.read_bytes())["child_paths"])
    return json.dumps({"child_paths": {name: name for name in names}}, sort_keys=True).encode()


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None  # it is a regular file
    return file.read()


def _check_file(path: Path, name: str, data: bytes, stated: str) -> None:
    if not ALLOWED.fullmatch(name):
        raise StoreError(f"{path} holds {name!r}, which has no place in a cache")
    digest = hashlib.sha256(data).hexdigest()
    if digest != stated or (name.startswith("objects/") and digest != "".join(name.split("/")[1:])):
        raise StoreError(f"{path} is damaged: {name} is not what the manifest says")
    if name.startswith("refs/") and not _is_record(data):
        raise StoreError(f"{path} is damaged: {name} is no record")


def _is_record(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except ValueError:
        return False
