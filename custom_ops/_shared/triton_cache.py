"""Triton's compiled kernels in our store: found again where the store has moved, noted when they are used."""

import importlib
import json
from pathlib import Path
from typing import Any

from ...common import env
from ...common.store import Store
from .ledger import LEDGER, TRITON, before_build


def keep_triton_kernels(store: Store) -> None:
    """Have Triton, which is not imported for it, keep what it compiles in the store."""
    folder = store.outside_folder(TRITON)
    env.keep_triton_kernels(folder)
    for path in folder.glob("*/__grp__*.json"):
        _point_here(path)


def listen() -> None:
    """Have every kernel of ours that Triton compiles or finds again noted; imports Triton."""
    importlib.import_module("triton").knobs.compilation.listener = _on_kernel


def _point_here(group: Path) -> None:
    """Triton lists the files of a kernel by their full paths, and takes a kernel that has moved for none."""
    try:
        paths = json.loads(group.read_bytes())["child_paths"]
        moved = {name: str(group.parent / name) for name in paths}
    except (OSError, ValueError, KeyError, TypeError):
        return  # Triton makes it again
    if moved != paths:
        group.write_text(json.dumps({"child_paths": moved}))


OPS = __name__.partition("._shared.")[0]


def _on_kernel(*, src: Any, metadata_group: dict[str, str], cache_hit: bool, **_: Any) -> None:
    """Triton has compiled a kernel or found it: what Inductor generated is no business of ours."""
    function = getattr(src, "fn", None)
    if not str(getattr(function, "__module__", "")).startswith(OPS):
        return
    name = str(getattr(function, "__name__", "?"))
    key = Path(next(iter(metadata_group.values()), "")).parent.name
    LEDGER.note(TRITON, key, name)
    if not cache_hit:
        before_build(f"the Triton kernel {name}")
