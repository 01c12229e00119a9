"""Whether compiled pieces compute what the model says, and which pass it is where one does not."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from ..common.errors import CompileError
from . import torch_compat
from .capture import NUM_TOKENS, POSITIONS, TOKEN_IDS, Attend
from .config import Numerics
from .passes import pipeline
from .passes.graph import Pass
from .split import AttentionCall, PieceCall, SplitModel

Call = Callable[[list[Any]], Sequence[Any]]
NARROW = (torch.float16, torch.bfloat16, torch.float32)
INT8_LINEAR = "lamina::linear_int8"  # takes its scales, the third argument, in float32 alone
LOOKUPS = ("embedding", "index_select", "getitem")  # exact in any dtype: a large table need not be widened
# Rounding explains what errs at most so many times as the model run op by op, both against float64; below
# the floor, in units of the dtype's rounding, chance decides.
RMS_FACTOR, RMS_FLOOR = 2.0, 2.0
MAX_FACTOR, MAX_FLOOR = 4.0, 32.0
SAMPLE_TOKENS = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Error:
    """How far something is from what is right, in units of the right thing's root mean square."""

    rms: float
    max: float

    def is_explained_by(self, naive: "Error", dtype: torch.dtype, slack: float = 1.0) -> bool:
        """Whether plain evaluation in that dtype errs by about as much; slack for errors that have grown."""
        eps = torch.finfo(dtype).eps
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
    """What makes a piece differ: a pass by its name, or code generation; the error with and without it."""

    name: str
    is_pass: bool
    error: Error

    def sentence(self) -> str:
        """What is to blame and how to do without it."""
        if not self.is_pass:
            return f"{self.name} makes it so, with any passes; use compile=False"
        if self.name not in pipeline.PASS_NAMES:
            return f"the pass {self.name} makes it so; leave it out of passes="
        setting = f"CompileConfig(passes=lamina.compiler.passes.pipeline.all_but({self.name!r}))"
        return f"the pass {self.name} makes it so; leave it out with --without-pass {self.name}, or {setting}"


def error_of(result: Tensor, right: Tensor) -> Error:
    """The error of one tensor against another of the same shape."""
    wide, wanted = result.double(), right.double()
    if not torch.isfinite(wide).all() and torch.isfinite(wanted).all():
        return Error(rms=float("inf"), max=float("inf"))
    scale = max(float(wanted.square().mean().sqrt()), 1e-30)
    difference = wide - wanted
    return Error(
        rms=float(difference.square().mean().sqrt()) / scale, max=float(difference.abs().max()) / scale
    )


def check_piece(
    module: fx.GraphModule, call: Call, arguments: Sequence[Any], numerics: Numerics
) -> PieceCheck:
    """The compiled call on these arguments, against float64 and against the graph run op by op."""
    with torch.no_grad():
        return _judge(module, call(list(arguments)), arguments, numerics)


def _judge(
    module: fx.GraphModule, results: Sequence[Any], arguments: Sequence[Any], numerics: Numerics
) -> PieceCheck:
    """Of several outputs the one that is furthest from being explained counts."""
    right = _Wide(module).run(*arguments)
    naive = module(*arguments)
    checks = [
        _check_output(result, plain, wanted, numerics)
        for result, plain, wanted, is_computed in zip(
            results, naive, right, _are_computed(module), strict=True
        )
        if is_computed
    ]
    if not checks:
        nothing = Error(rms=0.0, max=0.0)
        return PieceCheck(compiled=nothing, eager=nothing, is_right=True)
    return max(checks, key=lambda check: (not check.is_right, check.compiled.rms))


def _check_output(result: Tensor, naive: Tensor, right: Tensor, numerics: Numerics) -> PieceCheck:
    if tuple(result.shape) != tuple(right.shape) or result.dtype != naive.dtype:
        raise CompileError(
            f"a compiled piece returns {list(result.shape)} {result.dtype}; wanted "
            f"{list(right.shape)} {naive.dtype}"
        )
    compiled, eager = error_of(result, right), error_of(naive, right)
    explained = not naive.is_floating_point() or compiled.is_explained_by(eager, naive.dtype)
    is_right = torch.equal(result, naive) if numerics == "exact" else explained
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
    with torch.no_grad():
        for name, graph in stages[1:]:
            check = _judge(
                module, fx.Interpreter(fx.GraphModule({}, graph)).run(*arguments), arguments, numerics
            )
            if not check.is_right:
                return Culprit(name=name, is_pass=True, error=check.compiled)
    for name in [name for name, _ in stages[1:]]:
        check = check_piece(
            module, compile_without([step for step in passes if step.name != name]), arguments, numerics
        )
        if check.is_right:
            return Culprit(name=name, is_pass=True, error=check.compiled)
    return Culprit(name="code generation", is_pass=False, error=Error(rms=float("nan"), max=float("nan")))


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

    The piece runs on random tensors, so that nothing need be read first.
    """
    arguments = sample_arguments(module, device)
    found = check_piece(module, call, arguments, numerics)
    if found.is_right:
        return
    culprit = find_culprit(module, passes, arguments, numerics, folder, compile_without)
    raise CompileError(
        f"compiled code errs by {found.compiled.rms:.2g} where the model run op by op errs by "
        f"{found.eager.rms:.2g}, relative to its output; {culprit.sentence()}"
    )


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
    """Run a split model op by op; on_piece(number, piece, arguments) is told of each before it runs."""
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


def sample_arguments(module: fx.GraphModule, device: torch.device) -> list[Any]:
    """Random arguments for a piece, scaled so that nothing overflows; the same at every call."""
    generator = torch.Generator(device).manual_seed(0)
    examples = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
    tensors = [example for example in examples if isinstance(example, Tensor)]
    shapes = [[SAMPLE_TOKENS if not isinstance(size, int) else size for size in t.shape] for t in tensors]
    tables = [shape[0] for t, shape in zip(tensors, shapes, strict=True) if isinstance(t.shape[0], int)]
    shape_of = iter(shapes)

    def sample(example: Any) -> Any:
        if not isinstance(example, Tensor):
            return SAMPLE_TOKENS
        shape = next(shape_of)
        if example.dtype == torch.int8:
            return torch.randint(-3, 4, shape, generator=generator, dtype=torch.int8, device=device)
        if not example.is_floating_point():
            return torch.randint(min(tables), shape, generator=generator, dtype=example.dtype, device=device)
        values = torch.randn(shape, generator=generator, device=device)
        if isinstance(example.shape[0], int):  # a weight: of a norm about 1, of a product by its width
            values = 1 + 0.1 * values if len(shape) == 1 else values.div_(shape[-1] ** 0.5)
        return values.to(example.dtype)

    return [sample(example) for example in examples]


def _are_computed(module: fx.GraphModule) -> list[bool]:
    """For each output whether it has contents: attention's output leaves a piece as memory to be filled."""
    (outputs,) = module.graph.output_node().args
    return ["empty" not in _short_name(node) for node in outputs]  # type: ignore[union-attr, arg-type]


def _short_name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


class _Wide(fx.Interpreter):
    """Runs a captured graph in float64, whatever dtypes it names."""

    def run_node(self, node: fx.Node) -> Any:
        """One node with its tensors widened; what only looks up stays narrow until it has."""
        self._kept = range(len(node.args)) if _short_name(node) in LOOKUPS else range(0)
        if torch_compat.op_name(node.target) == INT8_LINEAR:
            self._kept = range(2, 3)
        return super().run_node(node)

    def fetch_args_kwargs_from_env(self, node: fx.Node) -> Any:
        """The node's arguments, tensors and dtypes widened."""
        args, kwargs = super().fetch_args_kwargs_from_env(node)
        widened = fx.node.map_aggregate((args, kwargs), _widened)
        kept = [args[place] if place in self._kept else value for place, value in enumerate(widened[0])]
        return tuple(kept), widened[1]

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A method; those that name a dtype give float64."""
        narrowing = target in ("float", "half", "bfloat16")
        return super().call_method("double" if narrowing else target, args, kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in NARROW:
        return value.double()
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value
