"""Whether compiled pieces compute what the model says, and which pass it is where one does not."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from ...common.errors import CompileError
from ..capture.capture import NUM_TOKENS, POSITIONS, TOKEN_IDS, Attend
from ..capture.fingerprint import source_line
from ..capture.split import AttentionCall, PieceCall, SplitModel
from ..numerics import Numerics
from ..passes import pipeline
from ..passes.graph import Pass
from ..torch_internals import torch_compat
from .op_by_op import OpByOp, Wide, makes_memory, quantizes_activations
from .samples import all_samples, sample_arguments

Call = Callable[[list[Any]], Sequence[Any]]
# Rounding explains what errs at most so many times as the model run op by op, both against float64; below
# the floor, in units of the dtype's rounding, chance decides.
RMS_FACTOR, RMS_FLOOR = 2.0, 2.0
MAX_FACTOR, MAX_FLOOR = 4.0, 32.0
QUANTIZED = torch.bfloat16  # whose rounding is about that of activations in one byte, by 32 columns or a row
# Calls that round as they do when run alone, or not at all.
EXACT_CALLS = {
    *("getitem", "embedding", "cat", "add", "iadd", "sub", "isub", "mul", "imul", "truediv", "neg"),
    *("empty", "empty_like", "zeros", "zeros_like", "ones_like", "where", "stack"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Error:
    """How far something is from what is right, in units of the right thing's root mean square."""

    rms: float
    max: float

    def is_explained_by(self, naive: "Error", eps: float, slack: float = 1.0) -> bool:
        """Whether plain evaluation, rounded by eps, errs about as much; slack for errors that have grown."""
        rms = slack * max(RMS_FACTOR * naive.rms, RMS_FLOOR * eps)
        return self.rms <= rms and self.max <= slack * max(MAX_FACTOR * naive.max, MAX_FLOOR * eps)


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceCheck:
    """A piece against its own graph: the compiled code's error and that of the graph run op by op."""

    compiled: Error
    eager: Error
    is_right: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Culprit:
    """What makes a piece wrong: a pass by name, calls outside of ops, or code generation; and its error."""

    name: str
    is_pass: bool
    error: Error
    is_call: bool = False  # of the model's own, outside of ops

    def sentence(self) -> str:
        """What is to blame and how to do without it."""
        if self.is_call:
            return f"in exact mode all that rounds goes through ops, and {self.name} does not"
        if not self.is_pass:
            return f"{self.name} makes it so, with any passes; use compile=False"
        if self.name not in pipeline.PASS_NAMES:
            return f"the pass {self.name} makes it so; leave it out of passes="
        setting = f"CompileConfig(passes=lamina.compiler.passes.pipeline.all_but({self.name!r}))"
        return f"the pass {self.name} makes it so; leave it out with --without-pass {self.name}, or {setting}"


_UNKNOWN = Error(rms=float("nan"), max=float("nan"))
_NOTHING = PieceCheck(compiled=Error(rms=0.0, max=0.0), eager=Error(rms=0.0, max=0.0), is_right=True)


def error_of(result: Tensor, right: Tensor) -> Error:
    """The error of one tensor against another of the same shape; infinities and NaNs that agree are right."""
    wide, wanted = result.double(), right.double()
    agree = _same(wide, wanted)
    if agree.all():
        return Error(rms=0.0, max=0.0)
    difference = (wide - wanted).abs().masked_fill(agree, 0.0).nan_to_num(nan=float("inf"))
    scale = max(float(wanted[wanted.isfinite()].square().mean().sqrt().nan_to_num(0.0)), 1e-30)
    return Error(rms=float(difference.square().mean().sqrt()) / scale, max=float(difference.max()) / scale)


def _same(one: Tensor, other: Tensor) -> Tensor:
    """Where two tensors are equal, NaNs included."""
    return (one == other) | (one.isnan() & other.isnan())


def check_piece(
    module: fx.GraphModule, call: Call, arguments: Sequence[Any], numerics: Numerics
) -> PieceCheck:
    """The compiled call on these arguments, against float64 and against the graph run op by op."""
    with torch.no_grad():
        return _judge(module, call(list(arguments)), arguments, numerics)


def _judge(
    module: fx.GraphModule, results: Sequence[Any], arguments: Sequence[Any], numerics: Numerics
) -> PieceCheck:
    """The check of the output, or the row of one, whose error rounding explains least."""
    right, naive = Wide(module).run(*arguments), OpByOp(module).run(*arguments)
    other = OpByOp(module, fill=1.0).run(*arguments) if _asks_for_memory(module) else naive
    checks, least = [_NOTHING], torch.finfo(QUANTIZED).eps if quantizes_activations(module) else 0.0
    for outputs in zip(results, naive, other, right, strict=True):
        _require_alike(*outputs)
        checks += [_check_rows(rows, numerics, least) for rows in _rows(*outputs)]
    return max(checks, key=lambda check: (not check.is_right, check.compiled.rms))


def _asks_for_memory(module: fx.GraphModule) -> bool:
    return any(makes_memory(node) for node in module.graph.nodes)


def _require_alike(result: Tensor, naive: Tensor, other: Tensor, right: Tensor) -> None:
    if tuple(result.shape) != tuple(right.shape) or result.dtype != naive.dtype:
        raise CompileError(
            f"a compiled piece returns {list(result.shape)} {result.dtype}; wanted "
            f"{list(right.shape)} {naive.dtype}"
        )


def _rows(*outputs: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors row by row where a row is odd, since its scale is another; else whole."""
    naive = outputs[1]
    is_odd = naive.ndim > 0 and naive.is_floating_point() and not _is_of_one_scale(naive)
    yield from zip(*outputs, strict=True) if is_odd else (outputs,)


def _is_of_one_scale(naive: Tensor) -> bool:
    sizes = naive.detach().double().flatten(1).abs().amax(1) if naive.ndim > 1 else naive.double().abs()
    return bool(sizes.isfinite().all()) and float(sizes.max()) <= 1e3 * max(float(sizes.min()), 1e-30)


def _check_rows(rows: tuple[Tensor, ...], numerics: Numerics, least_eps: float) -> PieceCheck:
    """The check of some rows; what differs between two plain runs is memory nobody wrote, and is skipped.

    least_eps: of the rounding that explains errors, where it is coarser than that of their dtype.
    """
    result, naive, other, right = rows
    written = _same(naive, other)
    if not written.any():
        return _NOTHING
    result, naive, right = result[written], naive[written], right[written]
    compiled, eager = error_of(result, right), error_of(naive, right)
    must_be_equal = numerics == "exact" or not naive.is_floating_point()
    is_equal = bool(_same(result, naive).all())
    if must_be_equal or is_equal:
        return PieceCheck(compiled=compiled, eager=eager, is_right=is_equal)
    is_right = compiled.is_explained_by(eager, max(torch.finfo(naive.dtype).eps, least_eps))
    return PieceCheck(compiled=compiled, eager=eager, is_right=is_right)


def find_culprit(
    module: fx.GraphModule,
    passes: Sequence[Pass],
    arguments: Sequence[Any],
    numerics: Numerics,
    folder: Path,
    compile_without: Callable[[Sequence[Pass]], Call],
) -> Culprit:
    """The pass after which a piece's graph no longer computes what it did; else what provokes wrong code.

    folder: for files that code generation leaves. compile_without(passes) compiles the piece with these.
    """
    stages = pass_stages(module, passes, folder)
    outside = Culprit(name=calls_outside_ops(module), is_pass=False, error=_UNKNOWN, is_call=True)
    with torch.no_grad():
        for name, graph in stages:
            check = _judge(module, OpByOp(fx.GraphModule({}, graph)).run(*arguments), arguments, numerics)
            if not check.is_right:
                error = check.compiled
                return (
                    Culprit(name=name, is_pass=True, error=error) if name else replace(outside, error=error)
                )
    for name in [name for name, _ in stages[1:]]:
        check = check_piece(
            module, compile_without([step for step in passes if step.name != name]), arguments, numerics
        )
        if check.is_right:
            return Culprit(name=name, is_pass=True, error=check.compiled)
    if numerics == "exact" and outside.name:
        return outside
    return Culprit(name="code generation", is_pass=False, error=_UNKNOWN)


def calls_outside_ops(module: fx.GraphModule) -> str:
    """The calls of a model that may round and are no ops of ours, each with its line; "" for none."""
    found = {}
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        is_ours = torch_compat.op_name(node.target).startswith("lamina::")
        if node.op != "call_function" or is_ours or getattr(node.target, "__name__", "") in EXACT_CALLS:
            continue
        if isinstance(value, Tensor) and value.is_floating_point():
            found[torch_compat.qualified_name(node.target)] = source_line(node)
    return ", ".join(f"{name}{line}" for name, line in found.items())


def require_right(
    module: fx.GraphModule,
    call: Call,
    passes: Sequence[Pass],
    numerics: Numerics,
    device: torch.device,
    folder: Path,
    compile_without: Callable[[Sequence[Pass]], Call],
) -> None:
    """Raise CompileError, naming the pass to leave out, where a piece errs more than rounding explains.

    The piece runs on tensors made up for it, so that nothing need be read first.
    """
    for arguments in all_samples(module, device):
        found = check_piece(module, call, arguments, numerics)
        if not found.is_right:
            culprit = find_culprit(module, passes, arguments, numerics, folder, compile_without)
            raise CompileError(f"compiled code {_errs(found)}; {culprit.sentence()}")


def _errs(check: PieceCheck) -> str:
    return (
        f"errs by {check.compiled.rms:.2g} where the model run op by op errs by {check.eager.rms:.2g}, "
        "relative to its output"
    )


def require_right_model(
    module: fx.GraphModule, stages: Mapping[str, fx.Graph], numerics: Numerics, device: torch.device
) -> None:
    """Raise CompileError, naming the pass, where the whole graph after it computes something else.

    stages: the graph after each pass, by its name. Attention is that of a whole sequence.
    """
    arguments = sample_arguments(module, device)
    with torch.no_grad():
        for name, graph in stages.items():
            results = OpByOp(fx.GraphModule(module, graph)).run(*arguments)
            check = _judge(module, results, arguments, numerics)
            if not check.is_right:
                culprit = Culprit(name=name, is_pass=True, error=check.compiled)
                raise CompileError(f"the rewritten model {_errs(check)}; {culprit.sentence()}")


def pass_stages(module: fx.GraphModule, passes: Sequence[Pass], folder: Path) -> list[tuple[str, fx.Graph]]:
    """The ATen graph of a piece, then the graph after each pass by the name of the pass."""
    found: list[tuple[str, fx.Graph]] = []

    def rewrite(graph: fx.Graph) -> fx.Graph:
        found.append(("", graph))
        for step in pipeline.of_scope(passes, "piece"):
            found.append((step.name, step.run(found[-1][1])[0]))
        raise torch_compat.AlreadyKnown

    torch_compat.generate(module, rewrite, folder)
    return found


def walk(
    model: SplitModel,
    weights: Mapping[str, Tensor],
    token_ids: Tensor,
    positions: Tensor,
    attend: Attend,
    on_piece: Callable[[int, PieceCall, list[Any]], None],
) -> Tensor:
    """Run a split model op by op; on_piece(number, piece, arguments) is called before each runs."""
    values: dict[str, Any] = dict(weights)
    values |= {TOKEN_IDS: token_ids, POSITIONS: positions, NUM_TOKENS: token_ids.shape[0]}
    number = 0
    for call in model.calls:
        if isinstance(call, AttentionCall):
            attend(call.layer, *(values[name] for name in call.tensors))
            continue
        arguments = [values[name] for name in call.inputs]
        on_piece(number, call, arguments)
        values |= dict(zip(call.outputs, call.graph(*arguments), strict=True))
        number += 1
    result: Tensor = values[model.result]
    return result
