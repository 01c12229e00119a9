"""One piece through AOT, the passes and Inductor, to an artifact of source, kernels and JSON."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import fx

from ...common.errors import StoreError
from ...common.logging import get_logger
from ...common.store import Store
from ..capture.fingerprint import canonical_text
from ..capture.origins import origins
from ..passes import pipeline
from ..passes.gemms import Gemm, gemms
from ..passes.graph import Pass
from ..torch_internals import torch_compat
from .launch import kernels_of
from .wrapper import Call, call_of_whole, load_source, obstacle

logger = get_logger("compiler")
PIECES = "pieces"  # the kind of the store's names for artifacts
RECORD = 2  # the form of an artifact's record: one of an earlier form is not looked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """A compiled piece as it lies in the store: digests of source and kernels, what the passes did, and the
    GEMMs that are left to ops of ours."""

    key: str
    source: str
    kernels: Mapping[str, str]  # C++, by name
    launches: Mapping[str, Any]  # Triton, by name; without those that only Inductor can launch
    graph_before: str
    stages: tuple[str, ...]  # the graph after each pass
    origins: str  # the lines of the model's code behind graph_before
    reports: tuple[Mapping[str, Any], ...]  # of each pass
    gemms: tuple[Gemm, ...]
    device: str
    is_checked: bool  # what it computes, by whoever made it
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
    """The piece from the store where its graph, as it was and rewritten, is known, else compiled and stored.

    check: raises where a call computes the wrong thing; what was stored without one is checked now.
    """
    started = time.perf_counter()
    found: dict[str, Any] = {}

    def rewrite(graph: fx.Graph) -> fx.Graph:
        rewritten = pipeline.rewrite(graph, passes)
        found["before"], found["origins"] = canonical_text(graph), origins(graph)
        found["stages"] = [canonical_text(stage) for stage in rewritten.stages]
        found["reports"] = tuple(asdict(report) for report in rewritten.reports)
        found["gemms"] = gemms(rewritten.graph)
        texts = found["before"], canonical_text(rewritten.graph)
        inductor = torch_compat.inductor_config()
        found["key"] = piece_key("\nbecomes\n".join(texts), {**factors, "inductor": inductor})
        found["known"] = load_piece(found["key"], store, device)
        if found["known"] is not None:
            raise torch_compat.AlreadyKnown
        return rewritten.graph

    kernel_folder = store.build_folder()
    source = torch_compat.generate(module, rewrite, kernel_folder)
    if source is None:
        return _checked(found["known"], check, store)
    source = normalise(source)
    namespace = torch_compat.run_source(source, f"lamina_piece_{found['key'][:16]}", kernel_folder)
    with store.using():  # until what is put is named
        digest = store.put(source.encode())
        native = torch_compat.native_kernels(namespace)
        kernels = {name: store.put(path.read_bytes()) for name, path in sorted(native.items())}
        launches = {name: one.as_record() for name, one in kernels_of(namespace, store).items()}
        why, here = obstacle(source, {*kernels, *launches}), (store, device)  # checked as a warm start has it
        call = call_of_whole(namespace, why) if why else load_source(digest, kernels, launches, *here)
        if check is not None:
            check(call)
        artifact = Artifact(
            key=found["key"],
            source=digest,
            kernels=kernels,
            launches=launches,
            graph_before=store.put(found["before"].encode()),
            stages=tuple(store.put(text.encode()) for text in found["stages"]),
            origins=store.put(json.dumps(found["origins"]).encode()),
            reports=found["reports"],
            gemms=found["gemms"],
            device=device.type,
            is_checked=check is not None,
            seconds=round(time.perf_counter() - started, 3),
        )
        store.write_ref(PIECES, artifact.key, asdict(artifact))
    return Piece(artifact=artifact, call=call, was_compiled=True)


def _checked(piece: Piece, check: Callable[[Call], None] | None, store: Store) -> Piece:
    """A stored piece; where it was stored unchecked and there is a check, that runs now and is noted."""
    if check is None or piece.artifact.is_checked:
        return piece
    check(piece.call)
    artifact = replace(piece.artifact, is_checked=True)
    store.write_ref(PIECES, artifact.key, asdict(artifact))
    return replace(piece, artifact=artifact)


def load_piece(key: str, store: Store, device: torch.device) -> Piece | None:
    """The stored piece of this key, or None where it or a part of it is missing or damaged."""
    record = store.read_ref(PIECES, key)
    if record is None:
        return None
    try:
        with store.using():
            artifact = _read_artifact(record, key)
            call = load_source(artifact.source, artifact.kernels, artifact.launches, store, device)
        return Piece(artifact=artifact, call=call, was_compiled=False)
    except StoreError:  # logged by the store
        return None
    except (TypeError, KeyError, ValueError, AttributeError, SyntaxError) as error:
        logger.warning("the cached piece %s could not be used and is made again: %r", key[:16], error)
        return None


def missing_of_piece(key: str, store: Store, *, must_be_checked: bool) -> str | None:
    """Why a piece cannot be used as it lies in the store, or None where it can."""
    try:
        artifact = _read_artifact(store.read_ref(PIECES, key) or {}, key)
        for digest in (*artifact.kernels.values(), *(one["cubin"] for one in artifact.launches.values())):
            store.get(digest)
        source = store.get(artifact.source).decode()
    except StoreError as error:
        return str(error)
    except (TypeError, KeyError, ValueError, AttributeError):
        return "its record was lost"
    if must_be_checked and not artifact.is_checked:
        return "nobody has checked what it computes"
    why = obstacle(source, {*artifact.kernels, *artifact.launches})
    return f"only Inductor can load it, since {why}" if why else None


def _read_artifact(record: Mapping[str, Any], key: str) -> Artifact:
    """The artifact of a record; ValueError where it is another piece's."""
    if record["key"] != key:
        raise ValueError("its record is of another piece")
    found = tuple(Gemm(**gemm) for gemm in record["gemms"])
    return Artifact(
        **{
            **record,
            "reports": tuple(record["reports"]),
            "stages": tuple(record["stages"]),
            "gemms": found,
        }
    )


def piece_key(text: str, factors: Mapping[str, Any]) -> str:
    """The name of a piece: its graph, as it was checked and rewritten, settings and toolchain."""
    facts = {"graph": text, "record": RECORD, "settings": torch_compat.SETTINGS, **factors}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def normalise(source: str) -> str:
    """The source without Inductor's counter and the places of its files, which are comments."""
    lines = source.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(("# AOT ID", "# kernel path:")))
