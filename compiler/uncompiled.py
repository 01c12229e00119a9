"""A plan whose pieces run op by op as they were traced, for who wants a model in stages and no compiler."""

from typing import Any

from torch import fx

from .codegen.inductor import Artifact, Piece
from .codegen.wrapper import Call
from .compile import Program, split_program
from .execution.plan import Plan, steps_of, values_of
from .torch_internals.torch_section import compiling, neutral


def uncompiled_plan(program: Program) -> Plan:
    """The steps of a program, none of them compiled; nothing is read from the store or written there.

    Raises CompileError where the program cannot be traced.
    """
    with neutral(), compiling():
        model = split_program(program, ())
    return Plan(
        steps=steps_of(model, range(len(model.pieces))),
        pieces=tuple(_piece(call.graph, program.device.type) for call in model.pieces),
        parameters=program.parameters,
        result=model.result,
        values=values_of(model),
    )


def _piece(module: fx.GraphModule, device: str) -> Piece:
    nothing: dict[str, Any] = dict.fromkeys(("key", "source", "graph_before", "origins"), "")
    nothing |= dict.fromkeys(("stages", "reports", "gemms"), ())
    artifact = Artifact(**nothing, kernels={}, launches={}, device=device, is_checked=False)
    return Piece(artifact=artifact, call=_as_traced(module), was_compiled=False)


def _as_traced(module: fx.GraphModule) -> Call:
    def call(arguments: list[Any]) -> tuple[Any, ...]:
        given = tuple(arguments)
        arguments.clear()
        results: tuple[Any, ...] = module(*given)
        return results

    return call
