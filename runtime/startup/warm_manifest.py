"""What serving with some settings needs from the cache: noted when it ran, checked before it runs again."""

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import custom_ops
from ...common.errors import NotWarmError
from ...common.logging import get_logger
from ...common.progress import Progress
from ...common.store import Store
from ...compiler import cache
from ...compiler.execution.plan import Compiled
from ...custom_ops._shared.build import CSRC, find_built
from ...custom_ops._shared.ledger import KERNELS, LEDGER, TRITON
from .resolved import ResolvedRuntime

logger = get_logger("runtime")

SERVING = "serving"  # the store's names for these notes
NAMES = "names"  # and for what models are called, by keys of their plans, notes and folders
SIZES = ("sizes", "block_size")  # factors that no C++ or CUDA kernel depends on
PACKAGES = ("triton", "flash-attn-4", "flash-attn", "flash-attn-3")  # whose kernels may serve an op


@dataclass(slots=True)
class LateBuilds:
    """Called with what is built once a runtime is ready: raises NotWarmError where strict, else notes it."""

    strict: bool
    events: list[str] = field(default_factory=list)

    def __call__(self, what: str) -> None:
        message = f"{what} was not ready when the runtime was: it is built in the middle of a request"
        if self.strict:
            raise NotWarmError(f"{message}; run `lamina warmup` with these settings, or leave strict mode")
        self.events.append(what)
        logger.warning("%s", message)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lacks:
    """What a start would have to make, one line each: compiled, traced or built, and measured anew."""

    missing: tuple[str, ...]
    unmeasured: tuple[str, ...]


def say_what_was_loaded(store: Store, compiled: Compiled | None, startup: Mapping[str, float]) -> None:
    """Log what came from the cache, where nothing had to be compiled."""
    if compiled is not None and not compiled.num_compiled:
        found = f"loaded {compiled.num_loaded} pieces and {len(LEDGER.used)} kernels from {store.root}"
        seconds = sum(compiled.seconds.values()) + startup.get("kernels", 0.0)
        logger.info("%s in %.2f s, nothing compiled", found, seconds)


def permit(progress: Progress, what: str) -> None:
    """Called before a build where all may be built: logs and shows it."""
    logger.info("building %s", what)
    progress("kernels", 0.0, what)


def refuse(what: str) -> None:
    """Called before a build where nothing may be built: raises NotWarmError."""
    raise NotWarmError(f"{what} is not in the cache {LEDGER.store.root}; run `lamina warmup`")


def serving_factors(resolved: ResolvedRuntime, plan: Mapping[str, Any] | None) -> dict[str, Any]:
    """Everything that decides which compiled things a runtime uses, by name; no path and no model name."""
    config, compiled = resolved.config, resolved.config.compile_config
    return {
        **(plan or {"plan": "eager"}),
        **_drafter_factors(resolved.drafter),
        "dtype": str(resolved.dtype),
        "kv_cache_dtype": str(resolved.kv_cache_dtype),
        "quantization": resolved.schemes.facts(),
        "attention": config.attention,
        "sizes": [resolved.max_num_seqs, resolved.max_num_batched_tokens, resolved.max_model_len],
        "block_size": resolved.block_size,
        "cuda_graphs": compiled.cuda_graphs if compiled else "off",
        "kernels": cache.hash_files(_kernel_sources()),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _drafter_factors(drafter: ResolvedRuntime | None) -> dict[str, Any]:
    """Of a model that drafts: which plan it has; nothing where there is none."""
    if drafter is None:
        return {}
    plan = drafter.plan_factors()
    return {"drafter": "eager" if plan is None else cache.plan_key(plan)}


def note(
    store: Store, factors: Mapping[str, Any], plan: str | None, measurements: Sequence[str] = ()
) -> None:
    """Write down what this process has used, if the store does not say so yet."""
    used: dict[str, list[str]] = {
        kind: sorted({one.key for one in LEDGER.used if one.kind == kind}) for kind in (KERNELS, TRITON)
    }
    used["measurements"] = sorted(measurements)
    record = {"factors": cache.summary(factors), "plan": plan, "names": _names(), **used}
    key = serving_key(factors)
    if store.read_ref(SERVING, key) != record:
        store.remember(SERVING, key, record)


def note_name(store: Store, keys: Iterable[str], model: str | Path) -> None:
    """Write down what a model is called whose things these are; for people alone, and never exported."""
    path = Path(model).expanduser()
    name = path.resolve().name if path.exists() else str(model)  # the id on a hub
    for key in keys:
        names = store.read_ref(NAMES, key)
        known = names if isinstance(names, list) else []
        if name not in known:
            store.remember(NAMES, key, sorted([*known, name]))


def serving_key(factors: Mapping[str, Any]) -> str:
    """The name of the note for these factors, a sha256."""
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()


def missing_kernels(store: Store, factors: Mapping[str, Any]) -> list[str]:
    """What would have to be built beside the plan; which setting differs, where none was noted."""
    record = store.read_ref(SERVING, serving_key(factors)) or _note_of_other_sizes(store, factors)
    if not isinstance(record, dict):
        return [f"a warm-up with these settings: {cache.nearest(factors, store, SERVING)}"]
    names = record.get("names", {})
    lost = [key for key in record.get(KERNELS, ()) if find_built(store, key) is None]
    lost += [key for key in record.get(TRITON, ()) if not _has_triton(store, key)]
    return [f"the kernel of {names.get(key, '?')} ({key[:16]})" for key in lost]


def _note_of_other_sizes(store: Store, factors: Mapping[str, Any]) -> dict[str, Any] | None:
    """A note that differs in sizes alone: C++ and CUDA kernels serve any; Triton makes some for each."""
    wanted = cache.summary(factors)
    for record in store.refs(SERVING).values():
        if isinstance(record, dict) and isinstance(record.get("factors"), dict) and not record.get(TRITON):
            noted = record["factors"]
            if all(noted.get(name) == wanted.get(name) for name in {**noted, **wanted} if name not in SIZES):
                return record
    return None


def _has_triton(store: Store, key: str) -> bool:
    folder = store.root / "outside" / TRITON / key
    return any(folder.glob("*.cubin")) and any(folder.glob("__grp__*.json"))


def _names() -> dict[str, str]:
    return {one.key: one.op for one in LEDGER.used}


def _kernel_sources() -> Iterator[Path]:
    yield from (path for path in CSRC.rglob("*") if path.suffix in (".cpp", ".h", ".cu", ".cuh"))
    folder = Path(custom_ops.__file__ or "").parent
    yield from (path for path in folder.rglob("*") if path.suffix in (".py", ".json"))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
