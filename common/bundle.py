"""Compiled things of a store in one file: the same bytes for the same things, signed or trusted by hand."""

import hashlib
import io
import json
import mmap
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .contents import Entry, closure, entries
from .errors import StoreError
from .sealed import seal, unseal
from .store import Store

FORMAT = 2
KINDS = (
    "plans",
    "questions",
    "pieces",
    "kernels",
    "serving",
    "measurements",
)  # of names that mean the same on every machine
TRITON = "outside/triton"
MANIFEST, SIGNATURE = "manifest.json", "signature.json"
ALLOWED = re.compile(
    rf"objects/[0-9a-f]{{2}}/[0-9a-f]{{62}}|refs/({'|'.join(KINDS)})/[0-9a-f]{{64}}\.json"
    rf"|{TRITON}/[A-Z0-9]+/\w[\w.+-]*"
)
BUNDLES = "bundles"  # the store's names for what was imported
BLOCK = tarfile.BLOCKSIZE
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """How many files of a bundle were new to a store, and how many replaced damaged ones."""

    num_new: int
    num_healed: int


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
    """A bundle's content, each file checked against the manifest; StoreError for anything else.

    Takes no more memory than the file has bytes, whatever its headers say.
    """
    try:
        contents = dict(_members(path))
        manifest = contents.pop(MANIFEST)
        stated = _stated(manifest)
        signature = _texts(json.loads(contents.pop(SIGNATURE))) if SIGNATURE in contents else None
    except KeyError:
        raise StoreError(f"{path} is no bundle of Lamina: it has no {MANIFEST}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path} is no bundle of Lamina, or a damaged one: {error}") from error
    if stated.keys() != contents.keys():
        raise StoreError(f"{path} holds other files than its manifest says")
    for name, data in contents.items():
        _check_file(path, name, data, stated[name])
    return Bundle(files=contents, manifest=manifest, signature=signature)


def _stated(manifest: bytes) -> dict[str, str]:
    """The hash of each file."""
    content = json.loads(manifest)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"its manifest is of another format; wanted {FORMAT}")
    return _texts(content.get("files"))


def _texts(content: Any) -> dict[str, str]:
    if not isinstance(content, dict) or not all(isinstance(value, str) for value in content.values()):
        raise ValueError("its manifest or its signature is no table of texts")
    return content


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file of an archive as _write writes it: plain files, each name once."""
    if not os.path.getsize(path):
        raise ValueError("it is empty")
    seen = set[str]()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as archive:
        offset = 0
        while any(header := archive[offset : offset + BLOCK]):
            try:
                member = tarfile.TarInfo.frombuf(header, "ascii", "strict")
            except (tarfile.TarError, UnicodeError) as error:
                raise ValueError(f"the header at byte {offset}: {error}") from error
            start, end = offset + BLOCK, offset + BLOCK + member.size
            if member.type != tarfile.REGTYPE or member.name in seen:
                raise ValueError(f"{member.name[:100]!r} is no plain file, or is there twice")
            if not start <= end <= len(archive):
                raise ValueError(f"{member.name[:100]!r} reaches beyond the end of the file")
            seen.add(member.name)
            yield member.name, archive[start:end]
            offset = start + -(-member.size // BLOCK) * BLOCK


def import_bundle(store: Store, bundle: Bundle, signer: str | None) -> Imported:
    """Put a bundle's files into the store, apart from those that are there whole.

    Whoever calls this has decided to trust the bundle: what is imported is code. signer is the public key
    that was verified, None where nothing was. Raises StoreError for a store that cannot be written.
    """
    if not store.is_writable:
        raise StoreError(f"cache folder {store.root} is read-only: nothing was imported")
    num_new = num_healed = 0
    with store.using():
        for name, data in sorted(bundle.files.items()):  # objects before the names that need them
            was_there = (store.root / name).exists()
            if _place(store, name, data):
                num_new, num_healed = num_new + (not was_there), num_healed + was_there
        record = {"signer": signer, "files": sorted(bundle.files)}
        store.write_ref(BUNDLES, bundle.digest, record)
    return Imported(num_new=num_new, num_healed=num_healed)


def _place(store: Store, name: str, data: bytes) -> bool:
    """Whether a file had to be written."""
    kind, *rest = name.split("/")
    if kind == "objects":
        is_new = not store.has("".join(rest))
        store.put(data)
    elif kind == "refs":
        key = rest[1].removesuffix(".json")
        is_new = store.read_ref(rest[0], key) is None
        if is_new:
            store.write_ref(rest[0], key, unseal(f"{rest[0]}/{key}", data))
    else:
        is_new = store.put_outside(name, data)
    return is_new


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
            files[name] = _portable(store, *path.parts[-2:])
        else:
            files[name] = store.get(path.parent.name + path.name)
    keys = {key for entry in chosen if entry.kind == "serving" for key in entry.value.get("triton", ())}
    for folder in sorted(store.root / TRITON / key for key in keys):
        for path in folder.glob("*"):
            if path.is_file() and (path.suffix in (".cubin", ".json", ".so")):
                files[path.relative_to(store.root).as_posix()] = _triton_file(path)
    return files


def _portable(store: Store, kind: str, file: str) -> bytes:
    """A record without what differs from one making to the next."""
    key = file.removesuffix(".json")
    value = store.read_ref(kind, key)
    if not isinstance(value, dict):
        raise StoreError(
            f"{kind}/{key} of the cache {store.root} is lost or damaged; see `lamina cache verify`"
        )
    return seal(f"{kind}/{key}", {name: item for name, item in value.items() if name not in LOCAL_FACTS})


def _triton_file(path: Path) -> bytes:
    """A file of Triton's; its lists of files hold full paths, which are names alone in a bundle."""
    if not path.name.startswith("__grp__"):
        return path.read_bytes()
    names = sorted(json.loads(path.read_bytes())["child_paths"])
    return json.dumps({"child_paths": {name: name for name in names}}, sort_keys=True).encode()


def _check_file(path: Path, name: str, data: bytes, stated: str) -> None:
    if not ALLOWED.fullmatch(name):
        raise StoreError(f"{path} holds {name!r}, which has no place in a cache")
    digest = hashlib.sha256(data).hexdigest()
    if digest != stated or (name.startswith("objects/") and digest != "".join(name.split("/")[1:])):
        raise StoreError(f"{path} is damaged: {name} is not what the manifest says")
    if name.startswith("refs/"):
        _check_record(path, name, data)


def _check_record(path: Path, name: str, data: bytes) -> None:
    of = name.removeprefix("refs/").removesuffix(".json")
    try:
        is_record = isinstance(unseal(of, data), dict)
    except ValueError as error:
        raise StoreError(f"{path} is damaged: {name} {error}") from error
    if not is_record:
        raise StoreError(f"{path} is damaged: {name} is no record")
