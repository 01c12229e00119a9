"""capture → split → fingerprint → passes → inductor → store → plan, or the plan straight from the store."""

import contextlib
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ..common.errors import CompileError, KernelBuildError, LaminaError, NotWarmError
from ..common.logging import get_logger
from ..common.progress import Progress, say_nothing
from ..common.store import Store
from ..custom_ops._shared.build import find_compiler
from . import cache
from .capture.capture import Captured, Forward, capture
from .capture.covered import own_sources
from .capture.fingerprint import canonical_text, group_equal
from .capture.readings import name_of
from .capture.split import SplitModel, split
from .codegen.inductor import Piece, compile_piece
from .codegen.wrapper import Call
from .config import CompileConfig
from .execution.plan import Compiled, ParameterTable, Plan, steps_of, values_of
from .inspect.verify import require_right, require_right_model
from .numerics import MAX_NUM_TOKENS, TOKENS_HINT, Numerics
from .passes import pipeline
from .passes.graph import Pass, is_same
from .torch_internals import torch_compat
from .torch_internals.torch_section import compiling, neutral

logger = get_logger("compiler")


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What the compiler is handed: a callable and the table of its weights.

    What the trace reads of the callable and its surroundings is kept with the plan; `key` and `sources` are
    for what it depends on without reading it.
    """

    forward: Forward
    parameters: ParameterTable
    device: torch.device
    states: tuple[int, torch.dtype] | None = None  # columns and dtype of a fifth argument, a row a token
    key: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[Path, ...] = ()


def compile_program(
    program: Program,
    config: CompileConfig,
    numerics: Numerics,
    store: Store,
    *,
    require_warm: bool = False,
    progress: Progress = say_nothing,
) -> Compiled:
    """The program's plan; compiled under a lock, so that of many processes starting at once only one does.

    Raises NotWarmError where require_warm and the store lacks the plan, CompileError where a stage fails.
    """
    with neutral():
        passes = passes_of(config, numerics)
        asked = plan_factors(program, passes, numerics)
        factors = cache.with_readings(asked, program.forward, store)
        if require_warm:
            missing = cache.missing_parts(factors, store, must_be_checked=config.verify)
            if missing:
                raise NotWarmError(f"the cache {store.root} lacks {'; '.join(missing)}; run `lamina warmup`")
        loaded = _load(factors, store, program.device, config)
        if loaded is not None:
            return loaded
        miss = cache.explain_miss(factors, store)
        with store.lock("compile"):
            factors = cache.with_readings(asked, program.forward, store)
            loaded = _load(factors, store, program.device, config)
            if loaded is None:
                _require_tools(program.device)
            return loaded or _compile(program, passes, config, numerics, asked, store, miss, progress)


def _require_tools(device: torch.device) -> None:
    """Raise CompileError where the tools to build generated code are missing, before the slow trace."""
    if device.type != "cpu":
        return
    otherwise = "or run the model as it is, by compile=False"
    try:
        find_compiler()
    except KernelBuildError as error:
        raise CompileError(f"{error}, {otherwise}") from error
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.exists():
        raise CompileError(f"{headers} is not there; install Python's headers (python3-dev), {otherwise}")


def passes_of(config: CompileConfig, numerics: Numerics) -> tuple[Pass, ...]:
    """The passes that run with these settings, in order."""
    return pipeline.select(config.passes, numerics, batch_invariant=config.batch_invariant)


def factors_of(program: Program, config: CompileConfig, numerics: Numerics, store: Store) -> dict[str, Any]:
    """What the plan of a program depends on, with these settings and what earlier traces of it read."""
    passes = passes_of(config, numerics)
    return cache.with_readings(plan_factors(program, passes, numerics), program.forward, store)


def plan_factors(program: Program, passes: tuple[Pass, ...], numerics: Numerics) -> dict[str, Any]:
    """What is known before a trace of everything a plan depends on; the rest is what the trace reads.

    No path, host, environment or model name is among it.
    """
    return {
        "program": name_of(program.forward),
        "model": dict(program.key),
        "parameters": cache.describe_parameters(program.parameters),
        "states": None if program.states is None else [program.states[0], str(program.states[1])],
        "sources": cache.hash_files([*program.sources, *own_sources()]),
        "passes": list(pipeline.describe(passes)),
        "numerics": numerics,
        "tokens": [TOKENS_HINT, MAX_NUM_TOKENS],
        "settings": torch_compat.SETTINGS,
        "toolchain": torch_compat.toolchain(program.device),
    }


def _load(
    factors: Mapping[str, Any], store: Store, device: torch.device, config: CompileConfig
) -> Compiled | None:
    started = time.perf_counter()
    found = cache.load_plan(factors, store, device)
    if found is None:
        return None
    plan, guards = found
    if config.verify and not all(piece.artifact.is_checked for piece in plan.pieces):
        return None  # the pieces are there, and are checked when the plan is made again
    return Compiled(
        plan=plan,
        guards=tuple(guards),
        readings=factors[cache.READ],
        num_compiled=0,
        num_loaded=len(plan.pieces),
        seconds={"load": time.perf_counter() - started},
        miss=None,
    )


def _compile(
    program: Program,
    passes: tuple[Pass, ...],
    config: CompileConfig,
    numerics: Numerics,
    asked: Mapping[str, Any],
    store: Store,
    miss: str,
    progress: Progress,
) -> Compiled:
    logger.info("compiling: %s", miss)
    progress("capture", 0.0, "tracing the model")
    with compiling():
        wait_for_triton = torch_compat.begin_triton(program.device)
        captured = _capture(program)
        started = time.perf_counter()
        model, rewritten = _cut(captured, passes)
        if config.verify:
            stages = _changing_stages(captured.graph.graph, rewritten)
            require_right_model(captured.graph, stages, numerics, program.device)
    factors = {**asked, cache.READ: dict(captured.readings)}
    first = _first_equal(model)
    unique = sorted(set(first))
    toolchain = {"toolchain": factors["toolchain"], "numerics": numerics}
    pieces: list[Piece] = []
    wait_for_triton()
    for count, index in enumerate(unique):
        progress("compile", count / len(unique), f"piece {count + 1} of {len(unique)}")
        module = model.pieces[index].graph
        check = _check(module, passes, numerics, store, program.device, toolchain) if config.verify else None
        with compiling(), _explained(f"piece {count + 1} of {len(unique)}"):
            pieces.append(compile_piece(module, passes, store, program.device, toolchain, check))
    plan = Plan(
        steps=steps_of(model, [unique.index(index) for index in first]),
        pieces=tuple(pieces),
        parameters=_used_parameters(program.parameters, captured),
        result=model.result,
        reports=tuple(asdict(report) for report in rewritten.reports),
        values=values_of(model),
    )
    guards = [asdict(guard) for guard in captured.guards]
    cache.save_plan(plan, factors, guards, store)
    cache.keep_questions(asked, captured.readings, store)
    num_compiled = sum(piece.was_compiled for piece in pieces)
    return Compiled(
        plan=plan,
        guards=tuple(guards),
        readings=captured.readings,
        num_compiled=num_compiled,
        num_loaded=len(pieces) - num_compiled,
        seconds={"capture": captured.seconds, "compile": time.perf_counter() - started},
        miss=miss,
    )


def _check(
    module: fx.GraphModule,
    passes: tuple[Pass, ...],
    numerics: Numerics,
    store: Store,
    device: torch.device,
    factors: Mapping[str, Any],
) -> Callable[[Call], None]:
    """Refuses code that computes something else than its piece."""

    def compile_without(fewer: Sequence[Pass]) -> Call:
        return compile_piece(module, fewer, store, device, factors).call

    folder = store.build_folder()
    return lambda call: require_right(module, call, passes, numerics, device, folder, compile_without)


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Whatever stops code generation, from a missing compiler to a broken one, as a CompileError."""
    try:
        yield
    except LaminaError:
        raise
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        first = next((line.strip() for line in lines if "error:" in line), lines[0])
        is_full = "No space left on device" in str(error)
        remedy = "make room there, or set cache_dir" if is_full else "with compile=False it runs as it is"
        raise CompileError(f"{name} of the model could not be compiled: {first}; {remedy}") from error


def _capture(program: Program) -> Captured:
    weights = torch_compat.fake_tensors(program.parameters, program.device)
    return capture(program.forward, weights, program.device, program.states)


def _cut(captured: Captured, passes: tuple[Pass, ...]) -> tuple[SplitModel, pipeline.Rewritten]:
    """The captured graph, after the passes over the whole of it, in pieces; and what those passes did."""
    rewritten = pipeline.rewrite_model(captured.graph.graph, passes)
    return split(fx.GraphModule(captured.graph, rewritten.graph), captured.inputs), rewritten


def _changing_stages(graph: fx.Graph, rewritten: pipeline.Rewritten) -> dict[str, fx.Graph]:
    """The whole graph after each pass that changed it, whatever the pass reports, by the name of the pass."""
    stages = zip(rewritten.names, (graph, *rewritten.stages), rewritten.stages, strict=False)
    return {name: after for name, before, after in stages if not is_same(before, after)}


def _first_equal(model: SplitModel) -> list[int]:
    """For each piece the index of the first one that computes the same."""
    return group_equal(canonical_text(piece.graph.graph) for piece in model.pieces)


def _used_parameters(parameters: ParameterTable, captured: Captured) -> ParameterTable:
    """The weights that the captured graph reads."""
    used = set(captured.inputs.values())
    return {name: entry for name, entry in parameters.items() if name in used}


def split_program(program: Program, passes: tuple[Pass, ...]) -> SplitModel:
    """The program captured and cut into the pieces of its plan, before the passes over each of them."""
    return _cut(_capture(program), passes)[0]


def piece_graphs(program: Program) -> list[fx.Graph]:
    """The unique pieces of a program as captured, in order; for tests and explanations."""
    model, _ = _cut(_capture(program), ())
    return [model.pieces[index].graph.graph for index in sorted(set(_first_equal(model)))]
