"""`lamina cache`: what the cache holds, whether it is whole, and how it travels."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.errors import StoreError, shown
from . import options

if TYPE_CHECKING:
    from ..common.contents import Entry
    from ..common.store import Store

Key = Annotated[str, typer.Argument(help="The first characters of a key, as `lamina cache list` shows it.")]
Keys = Annotated[list[str] | None, typer.Argument(help="First characters of keys; all, if none is given.")]
Target = Annotated[Path, typer.Argument(help="The bundle to write.")]
Source = Annotated[Path, typer.Argument(help="The bundle to read.")]
SignWith = Annotated[Path | None, typer.Option("--sign", help="A private Ed25519 key, as PEM, to sign with.")]
SignedBy = Annotated[
    Path | None, typer.Option("--key", help="The public key, as PEM, that the bundle must be signed with.")
]
Trust = Annotated[bool, typer.Option("--trust", help="Import without a signature: run whatever is in it.")]
MaxSize = Annotated[str, typer.Option(help="What may stay, such as 500M or 20G.")]
NAMES = "names"  # the store's kind for what models are called, beside their keys
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

app = typer.Typer(help="Look at the cache, check it, keep it small, take it elsewhere.", no_args_is_help=True)


@app.command("list")
def list_entries(as_json: options.Json = False, cache_dir: options.CacheDir = None) -> None:
    """Every plan, piece, kernel, warm-up and converted model, the one used last first."""
    from ..common.contents import entries

    store = _store(cache_dir)
    rows = [_row(entry, store) for entry in entries(store) if entry.kind != NAMES]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(
            f"{row['kind']:<10} {row['key'][:16]:<16} {_size(row['bytes']):>8}  {row['used']}  {row['what']}"
        )


@app.command()
def show(key: Key, as_json: options.Json = False, cache_dir: options.CacheDir = None) -> None:
    """One entry: its record, and the files that it needs."""
    from ..common.contents import closure, entries

    store = _store(cache_dir)
    known = entries(store)
    found = [entry for entry in known if entry.key.startswith(key)]
    if len(found) != 1:
        raise StoreError(f"{len(found)} keys of the cache begin with {shown(key)}; wanted one")
    files = sorted(closure(store, found, known))
    facts = _row(found[0], store) | {
        "record": found[0].value,
        "files": [path.relative_to(store.root).as_posix() for path in files],
        "bytes_with_all_it_needs": sum(path.stat().st_size for path in files if path.is_file()),
    }
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        print(f"{name}: {json.dumps(value, indent=1) if isinstance(value, (dict, list)) else value}")


@app.command()
def verify(as_json: options.Json = False, cache_dir: options.CacheDir = None) -> None:
    """Hash every object and read every name again; exit with 1 if anything is damaged or lost."""
    from ..common.contents import verify as find_problems

    _report([f"{problem.path}: {problem.what}" for problem in find_problems(_store(cache_dir))], as_json)


@app.command()
def audit(as_json: options.Json = False, cache_dir: options.CacheDir = None) -> None:
    """Who may write here, what came from elsewhere and who signed it, what is no file of Lamina's.

    Exits with 1 if there is anything that a careful person would ask about.
    """
    from ..common.audit import audit as find_questions

    _report(find_questions(_store(cache_dir)), as_json)


@app.command()
def gc(max_size: MaxSize = "20G", as_json: options.Json = False, cache_dir: options.CacheDir = None) -> None:
    """Remove what nothing needs, then, until the cache is small enough, scratch, converted models, and
    compiled code last, each by how long ago it was used."""
    from ..common.collection import collect

    collected = collect(_store(cache_dir), _bytes(max_size))
    if as_json:
        print(json.dumps(asdict(collected), indent=2))
        return
    print(f"removed {_size(collected.removed_bytes)}, {len(collected.removed)} entries; ", end="")
    print(f"{_size(collected.left_bytes)} left")
    for reason in collected.reasons:
        print(f"stays: {reason}")


@app.command("export")
def export_(
    bundle: Target, keys: Keys = None, sign: SignWith = None, cache_dir: options.CacheDir = None
) -> None:
    """Write compiled things to one file, which is the same for the same things, and may be signed."""
    from ..common.bundle import export_bundle
    from ..common.signature import Signer

    count = export_bundle(_store(cache_dir), bundle, keys or (), None if sign is None else Signer(sign))
    print(f"{bundle}: {count} files, {_size(bundle.stat().st_size)}, {'signed' if sign else 'not signed'}")


@app.command("import")
def import_(
    bundle: Source, key: SignedBy = None, trust: Trust = False, cache_dir: options.CacheDir = None
) -> None:
    """Take in a bundle that a key you trust has signed, or that you trust for other reasons.

    A bundle is code that runs with your rights. A signature says that the holder of the key made it and that
    nobody changed it since; it does not say that the code does no harm.
    """
    from ..common.bundle import import_bundle, read_bundle
    from ..common.signature import is_signed, read_public_key

    content = read_bundle(bundle)
    if key is None and not trust:
        raise StoreError(f"{bundle} is code: give --key, a public key that must have signed it, or --trust")
    signer = None if key is None else read_public_key(key)
    if signer is not None:
        signature = content.signature or {}
        if not is_signed(content.manifest, signature.get("signature", ""), signer):
            raise StoreError(f"{bundle} is not signed with the key of {key}; nothing was imported")
    imported = import_bundle(_store(cache_dir), content, signer)
    healed = f", {imported.num_healed} took the place of damaged ones" if imported.num_healed else ""
    print(
        f"{imported.num_new} of {len(content.files)} files were new{healed}; now run `lamina warmup --check`"
    )


def _store(cache_dir: Path | None) -> "Store":
    from ..common.store import Store

    return Store(cache_dir)


def _report(lines: list[str], as_json: bool) -> None:
    """Print what was found; exit with 1 if that is anything."""
    if as_json:
        print(json.dumps({"found": lines}, indent=2))
    else:
        print("\n".join(lines) or "nothing to report")
    if lines:
        raise typer.Exit(1)


def _row(entry: "Entry", store: "Store") -> dict[str, Any]:
    names = store.read_ref(NAMES, entry.key)
    models = names if isinstance(names, list) else []
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
    what = "; ".join(filter(None, [", ".join(models), _what(entry.kind, entry.value)]))
    return {
        "kind": entry.kind,
        "key": entry.key,
        "bytes": entry.num_bytes,
        "used": used,
        "models": models,
        "what": what,
    }


def _what(kind: str, value: Any) -> str:
    """A record in a few words."""
    if not isinstance(value, dict):
        return ""
    if kind == "kernels":
        return f"{value.get('op', '?')}, {value.get('compiler', '?')}"
    if kind == "pieces":
        return f"{value.get('device', '?')}, {value.get('seconds', 0)} s to compile"
    factors = value.get("factors") or {}
    wanted = ("model.architecture", "model.num_layers", "numerics", "dtype", "sizes", "toolchain.torch")
    facts = (f"{name.removeprefix('model.')} {str(factors[name])[:60]}" for name in wanted if name in factors)
    return ", ".join(facts).replace('"', "")


def _size(num_bytes: int) -> str:
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def _bytes(text: str) -> int:
    number, unit = text.rstrip("BbKkMmGgTt"), text.lstrip("0123456789.").upper().removesuffix("B")
    try:
        return int(float(number) * UNITS[unit])
    except (ValueError, KeyError) as error:
        raise typer.BadParameter(f"max-size is {shown(text)}; wanted a size such as 500M or 20G") from error
