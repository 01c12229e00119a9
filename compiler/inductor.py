"""One piece through AOT, the passes and Inductor, to an artifact of source, kernels and JSON."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from ..common.errors import StoreError
from ..common.store import Store
from . import torch_compat
from .fingerprint import canonical_text
from .launch import kernels_of
from .origins import origins
from .passes import pipeline
from .passes.graph import Pass
from .passes.products import Product, products
from .wrapper import load_source, obstacle

Call = Callable[[list[Any]], tuple[Any, ...]]
PIECES = "pieces"  # the kind of the store's names for artifacts


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """A compiled piece as it lies in the store: digests of source and kernels, what the passes did, and the
    products that are left to ops of ours."""

    key: str
    source: str
    kernels: Mapping[str, str]  # C++, by name
    launches: Mapping[str, Any]  # Triton, by name; without those that only Inductor can launch
    graph_before: str
    stages: tuple[str, ...]  # the graph after each pass
    origins: str  # the lines of the model's code behind graph_before
    reports: tuple[Mapping[str, Any], ...]  # of each pass
    products: tuple[Product, ...]
    device: str
    seconds: float = 0.0  # that making it took here


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """An artifact made callable: a list of tensors in, a tuple of tensors out; the list is emptied."""

    artifact: Artifact
    call: Call
    was_compiled: bool


def compile_piece(
    module: fx.GraphModule,
    passes: Sequence[Pass],
    store: Store,
    device: torch.device,
    factors: Mapping[str, Any],
    check: Callable[[Call], None] | None = None,
) -> Piece:
    """The piece from the store where its rewritten graph is known, else compiled, checked and stored."""
    started = time.perf_counter()
    found: dict[str, Any] = {}

    def rewrite(graph: fx.Graph) -> fx.Graph:
        rewritten = pipeline.rewrite(graph, passes)
        found["before"], found["origins"] = canonical_text(graph), origins(graph)
        found["stages"] = [canonical_text(stage) for stage in rewritten.stages]
        found["reports"] = tuple(asdict(report) for report in rewritten.reports)
        found["products"] = products(rewritten.graph)
        found["key"] = piece_key(canonical_text(rewritten.graph), factors)
        found["known"] = load_piece(found["key"], store, device)
        if found["known"] is not None:
            raise torch_compat.AlreadyKnown
        return rewritten.graph

    kernel_folder = store.outside_folder("inductor")
    source = torch_compat.generate(module, rewrite, kernel_folder)
    if source is None:
        known: Piece = found["known"]
        return known
    source = normalise(source)
    namespace = torch_compat.run_source(source, f"lamina_piece_{found['key'][:16]}", kernel_folder)
    if check is not None:
        check(namespace["call"])
    kernels = torch_compat.native_kernels(namespace)
    artifact = Artifact(
        key=found["key"],
        source=store.put(source.encode()),
        kernels={name: store.put(path.read_bytes()) for name, path in sorted(kernels.items())},
        launches={name: one.as_record() for name, one in kernels_of(namespace, store).items()},
        graph_before=store.put(found["before"].encode()),
        stages=tuple(store.put(text.encode()) for text in found["stages"]),
        origins=store.put(json.dumps(found["origins"]).encode()),
        reports=found["reports"],
        products=found["products"],
        device=device.type,
        seconds=round(time.perf_counter() - started, 3),
    )
    store.write_ref(PIECES, artifact.key, asdict(artifact))
    call = namespace["call"]
    if device.type == "cpu" and obstacle(source, {*artifact.kernels, *artifact.launches}) is None:
        # as a warm start has it, which calls our ops directly
        call = load_source(artifact.source, artifact.kernels, artifact.launches, store, device)
    return Piece(artifact=artifact, call=call, was_compiled=True)


def load_piece(key: str, store: Store, device: torch.device) -> Piece | None:
    """The stored piece of this key, or None where it or a part of it is missing or damaged."""
    record = store.read_ref(PIECES, key)
    if record is None:
        return None
    try:
        artifact = _read_artifact(record)
        call = load_source(artifact.source, artifact.kernels, artifact.launches, store, device)
        return Piece(artifact=artifact, call=call, was_compiled=False)
    except (StoreError, TypeError, KeyError):
        return None


def missing_of_piece(key: str, store: Store) -> str | None:
    """Why a piece cannot be loaded without a compiler, or None where it can."""
    try:
        artifact = _read_artifact(store.read_ref(PIECES, key) or {})
        for digest in (*artifact.kernels.values(), *(one["cubin"] for one in artifact.launches.values())):
            store.get(digest)
        source = store.get(artifact.source).decode()
    except StoreError as error:
        return str(error)
    except (TypeError, KeyError):
        return "its record was lost"
    why = obstacle(source, {*artifact.kernels, *artifact.launches})
    return f"only Inductor can load it, since {why}" if why else None


def _read_artifact(record: Mapping[str, Any]) -> Artifact:
    found = tuple(Product(**product) for product in record["products"])
    return Artifact(
        **{
            **record,
            "reports": tuple(record["reports"]),
            "stages": tuple(record["stages"]),
            "products": found,
        }
    )


def piece_key(text: str, factors: Mapping[str, Any]) -> str:
    """The name of a piece: its rewritten graph, the settings of code generation, the toolchain."""
    facts = {"graph": text, "settings": torch_compat.SETTINGS, **factors}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def normalise(source: str) -> str:
    """The source without Inductor's counter and the places of its files, which are comments."""
    lines = source.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(("# AOT ID", "# kernel path:")))
