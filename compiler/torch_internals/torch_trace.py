"""One trace by TorchDynamo, whose guards are reported before anything runs."""

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ...common.errors import CompileError, LaminaError
from . import torch_fixes
from .torch_section import compiling

COMPILERS = ("torch._dynamo", "torch._inductor")  # their own modules, which a trace goes through


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardFact:
    """One assumption of a trace, in Dynamo's words."""

    kind: str
    subject: str  # an expression over G, the globals of the traced frame, and its arguments by name
    text: str
    arguments: Mapping[str, Any]  # what the kind asks beside its subject: a key, the name of an attribute


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What Dynamo found: the graph, and each placeholder with the value given for it."""

    graph: fx.GraphModule
    inputs: tuple[tuple[fx.Node, object], ...]


def bound_tokens(token_ids: Tensor, limit: int) -> None:
    """Give the tracer the largest size of dim 0, so that generated indices fit 32 bits."""
    check: Any = torch._check
    check(token_ids.shape[0] <= limit)


def match_tokens(states: Tensor, token_ids: Tensor) -> None:
    """Tell the tracer that both have a row a token, where its version does not know by their marks."""
    check: Any = torch._check
    check(states.shape[0] == token_ids.shape[0])


def mark_tokens(tensor: Tensor, hint: int) -> None:
    """Give dim 0 one symbol that is never specialised, not even to 0 or 1."""
    mark = torch._dynamo.decorators.mark_unbacked
    offered = inspect.signature(mark).parameters
    wished = {"shape_id": "num_tokens", "hint_override": hint}
    mark(tensor, 0, **{name: value for name, value in wished.items() if name in offered})


# called before what was traced runs: the guards, the globals they speak of, the code that was gone through
OnGuards = Callable[[list[GuardFact], Mapping[str, Any], list[types.CodeType]], None]


def trace_once(
    function: types.FunctionType,
    arguments: tuple[Any, ...],
    num_of_tokens: int,
    hint: int,
    on_guards: OnGuards,
) -> Trace:
    """One full Dynamo trace, so many of the last arguments being of any number of tokens.

    Raises CompileError with Dynamo's own words where it breaks.
    """
    found: dict[str, Any] = {}

    def keep_graph(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        placeholders = module.graph.find_nodes(op="placeholder")
        found.update(graph=module, inputs=tuple(zip(placeholders, inputs, strict=True)))
        found["codes"] = torch._guards.TracingContext.get().traced_code
        outputs: Any = module.graph.output_node().args[0]
        results = tuple(node.meta["example_value"] for node in outputs)
        return lambda *_: results

    def keep_guards(guards: Any) -> list[bool]:
        facts, codes = [_fact_of(guard) for guard in guards], list(found.get("codes", ()))
        try:
            on_guards(facts, copy.__globals__, codes)
        except LaminaError as error:  # Dynamo would wrap it
            found["error"] = error
        return [True] * len(guards)

    with compiling(), torch_fixes.every_read_is_guarded():
        # code and globals of its own: what Dynamo keeps for them goes with them
        copy = types.FunctionType(function.__code__.replace(), dict(function.__globals__), function.__name__)
        for tensor in arguments[-num_of_tokens:]:
            mark_tokens(tensor, hint)
        try:
            compiled = torch.compile(
                copy,
                backend=keep_graph,
                fullgraph=True,
                dynamic=False,
                options={"guard_filter_fn": keep_guards},
            )
            returned = compiled(*arguments)
        except Exception as error:
            raise CompileError(f"TorchDynamo could not capture the model in one graph: {error}") from error
    if "error" in found:
        raise found["error"]
    if not isinstance(returned, Tensor):
        raise CompileError(f"a model's forward returned {type(returned).__name__}; wanted one tensor")
    if "graph" not in found:
        raise CompileError("a model's forward computed nothing; wanted hidden states of its weights")
    return Trace(graph=found["graph"], inputs=found["inputs"])


def _fact_of(guard: Any) -> GuardFact:
    arguments = getattr(guard.orig_guard.create_fn, "keywords", {})
    subject = guard.name
    if guard.guard_type == "HASATTR" and "attr" not in arguments:  # torch 2.11: it is in the source
        subject, arguments = _split_attribute(guard.orig_guard.originating_source)
    return GuardFact(
        kind=str(guard.guard_type),
        subject=str(subject),
        text=repr(guard.value)[:200],
        arguments={name: _plain(value) for name, value in arguments.items()},
    )


def _split_attribute(source: Any) -> tuple[Any, Mapping[str, Any]]:
    """The expression of what an attribute is looked for in, and its name."""
    attribute = source if hasattr(source, "member") else source.base  # of modules the source is in another
    return _plain(attribute.base), {"attr": attribute.member}


def _plain(value: Any) -> Any:
    """A source by its expression, whichever torch has it as a method."""
    named = getattr(value, "name", None)
    return named() if callable(named) else value if named is None else named
