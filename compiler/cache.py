"""Keys of plans and their records in the store; what differs when nothing fits."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..common.errors import StoreError
from ..common.logging import get_logger
from ..common.store import Store
from .capture.readings import Readings, ask
from .codegen.inductor import Piece, load_piece, missing_of_piece
from .execution.message import TokenValue
from .execution.plan import ParameterTable, Plan, Step

logger = get_logger("compiler")
PLANS = "plans"
QUESTIONS = "questions"  # what earlier traces of a program read, by the factors known before a trace
MOST_QUESTIONS = 32  # lists of them, the newest first: a program that branches reads different things
READ = "read"  # the factor that holds what a trace read, with what it gave
IN_PARTS = ("model", "settings", "toolchain", READ)  # factors that are small, and whose parts say more
MOST_NAMES = 8  # that a miss lists
NOUNS = {PLANS: "plan", "serving": "warm-up"}


def plan_key(factors: Mapping[str, Any]) -> str:
    """The sha256, in hex, of a plan's factors: all that the trace and its compiled pieces depend on."""
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()


def hash_files(paths: Iterable[Path]) -> str:
    """The sha256, in hex, over names and contents of files, whatever folders they lie in."""
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: (path.name, str(path))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def describe_parameters(parameters: ParameterTable) -> dict[str, str]:
    """Each parameter's shape and dtype as text, by name, for keys and records."""
    return {name: f"{list(shape)} {dtype}" for name, (shape, dtype) in parameters.items()}


def save_plan(plan: Plan, factors: Mapping[str, Any], guards: list[dict[str, str]], store: Store) -> None:
    """Store the plan's steps and the keys of its pieces under the hash of its factors."""
    record = {
        "factors": dict(factors),
        "steps": [asdict(step) for step in plan.steps],
        "pieces": [piece.artifact.key for piece in plan.pieces],
        "result": plan.result,
        "values": {name: [list(value.shape), str(value.dtype)] for name, value in plan.values.items()},
        "reports": list(plan.reports),
        "parameters": {name: [list(shape), str(dtype)] for name, (shape, dtype) in plan.parameters.items()},
        "guards": guards,
    }
    asked = {name: value for name, value in factors.items() if name != READ}
    with store.using():
        digest = store.put(json.dumps(record, sort_keys=True).encode())
        reference = {"record": digest, "factors": summary(factors), "questions": plan_key(asked)}
        store.write_ref(PLANS, plan_key(factors), reference)


def keep_questions(asked: Mapping[str, Any], readings: Readings, store: Store) -> None:
    """Store what a trace with these factors read, so that later starts can ask the same questions."""
    known = _questions(asked, store)
    lists = [sorted(readings), *(questions for questions in known if questions != sorted(readings))]
    record = {"program": asked.get("program"), "questions": lists[:MOST_QUESTIONS]}
    store.write_ref(QUESTIONS, plan_key(asked), record)


def with_readings(asked: Mapping[str, Any], forward: object, store: Store) -> dict[str, Any]:
    """The factors with what the program reads now, as a stored plan that fits asks, else the newest."""
    candidates = [{**asked, READ: ask(questions, forward)} for questions in _questions(asked, store)]
    fitting = (factors for factors in candidates if store.read_ref(PLANS, plan_key(factors)) is not None)
    return next(fitting, candidates[0] if candidates else {**asked, READ: {}})


def _questions(asked: Mapping[str, Any], store: Store) -> list[list[str]]:
    record = store.read_ref(QUESTIONS, plan_key(asked))
    lists = record.get("questions") if isinstance(record, dict) else None
    return [
        questions
        for questions in (lists if isinstance(lists, list) else [])
        if isinstance(questions, list) and all(isinstance(question, str) for question in questions)
    ]


def load_plan(
    factors: Mapping[str, Any], store: Store, device: torch.device
) -> tuple[Plan, list[dict[str, str]]] | None:
    """The stored plan of these factors with its guard ledger, or None where any part of it is missing."""
    with store.using():  # nothing is collected between its name and its last kernel
        return _load_plan(factors, store, device)


def _load_plan(
    factors: Mapping[str, Any], store: Store, device: torch.device
) -> tuple[Plan, list[dict[str, str]]] | None:
    reference = store.read_ref(PLANS, plan_key(factors))
    if reference is None:
        return None
    try:
        record = _record_of(factors, reference, store)
        pieces = [load_piece(key, store, device) for key in record["pieces"]]
        loaded = tuple(piece for piece in pieces if piece is not None)
        return (_read_plan(record, loaded), record["guards"]) if len(loaded) == len(pieces) else None
    except StoreError:  # logged by the store
        return None
    except Exception as error:
        logger.warning("a cached plan could not be used and will be made again: %r", error)
        return None


def _record_of(factors: Mapping[str, Any], reference: Any, store: Store) -> Any:
    """The record that a name leads to; ValueError where it is one of another plan."""
    record = json.loads(store.get(reference["record"]))
    if plan_key(record["factors"]) != plan_key(factors):
        raise ValueError("its record is of another plan")
    return record


def _read_plan(record: Mapping[str, Any], pieces: tuple[Piece, ...]) -> Plan:
    steps = tuple(
        Step(
            piece=step["piece"],
            layer=step["layer"],
            inputs=tuple(step["inputs"]),
            outputs=tuple(step["outputs"]),
        )
        for step in record["steps"]
    )
    return Plan(
        steps=steps,
        pieces=pieces,
        parameters=_shapes_and_dtypes(record["parameters"]),
        result=record["result"],
        values={name: TokenValue(*value) for name, value in _shapes_and_dtypes(record["values"]).items()},
        reports=tuple(record["reports"]),
    )


def _shapes_and_dtypes(record: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {
        name: (tuple(shape), getattr(torch, dtype.removeprefix("torch.")))
        for name, (shape, dtype) in record.items()
    }


def summary(factors: Mapping[str, Any]) -> dict[str, str]:
    """Each factor as a short text or hash, to compare entries by; some in parts, by their names."""
    parts = {
        f"{name}.{part}" if part else name: json.dumps(value, sort_keys=True)
        for name, whole in factors.items()
        for part, value in (whole if name in IN_PARTS else {"": whole}).items()
    }
    return {
        name: text if len(text) <= 200 else hashlib.sha256(text.encode()).hexdigest()[:16]
        for name, text in parts.items()
    }


def explain_miss(factors: Mapping[str, Any], store: Store) -> str:
    """Which factors differ from the nearest stored plan."""
    return nearest(factors, store, PLANS)


def nearest(factors: Mapping[str, Any], store: Store, kind: str) -> str:
    """Which factors differ from the stored name of a kind that has the fewest differences."""
    wanted = summary(factors)
    entries = [
        entry["factors"]
        for entry in store.refs(kind).values()
        if isinstance(entry, dict) and isinstance(entry.get("factors"), dict)
    ]
    if not entries:
        return f"the cache holds no {NOUNS[kind]} yet"
    differing = [
        [name for name in {**wanted, **entry} if entry.get(name) != wanted.get(name)] for entry in entries
    ]
    _, names = min((len(names), names) for names in differing)
    difference = ", ".join(names[:MOST_NAMES]) or "nothing: a part of it was lost"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"the nearest of {len(entries)} cached {NOUNS[kind]}s differs in {difference}{more}"


def missing_parts(factors: Mapping[str, Any], store: Store, *, must_be_checked: bool) -> list[str]:
    """What a start with these factors would trace, compile or check, a line each; empty if it is warm."""
    reference = store.read_ref(PLANS, plan_key(factors))
    if reference is None:
        return [f"the plan: {explain_miss(factors, store)}"]
    try:
        keys = _record_of(factors, reference, store)["pieces"]
    except StoreError as error:
        return [f"the plan: {error}"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ["the plan: its record cannot be read"]
    lacks = [missing_of_piece(key, store, must_be_checked=must_be_checked) for key in keys]
    return [f"piece {number} of the plan: {lack}" for number, lack in enumerate(lacks) if lack]
