"""Programs through the compiler with an interpreter in Inductor's place: pieces are run op by op."""

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from lamina.common.store import Store
from lamina.compiler import cache, compile
from lamina.compiler.capture.fingerprint import canonical_text
from lamina.compiler.codegen.inductor import Artifact, Piece, piece_key
from lamina.compiler.compile import Program, compile_program
from lamina.compiler.config import CompileConfig
from lamina.compiler.execution.plan import Compiled
from lamina.compiler.passes.graph import Pass, PassReport, copy_graph
from lamina.compiler.passes.pipeline import PASS_NAMES

from .worlds import CPU, FREE, TOKENS, WEIGHTS, World


def make_pass(factor: float) -> Pass:
    """A caller's own pass over the whole model: what it closes over decides what it computes."""

    def run(graph: fx.Graph) -> tuple[fx.Graph, PassReport]:
        copy = copy_graph(graph)
        first = next(node for node in copy.nodes if node.target is operator.mul)
        first.args = (first.args[0], factor)
        return copy, PassReport(name="factor", num_matches=1)

    return Pass(name="factor", version=1, reason="for a test", contract="none", run=run, scope="model")


class Interpreter:
    """In Inductor's place: pieces are kept as graphs by their keys, and run op by op."""

    def __init__(self, monkeypatch: Any) -> None:
        self.pieces: dict[str, Piece] = {}
        monkeypatch.setattr(compile, "compile_piece", self._compile)
        monkeypatch.setattr(cache, "load_piece", lambda key, store, device: self.pieces.get(key))

    def _compile(self, module: Any, passes: Any, store: Any, device: Any, factors: Any, check: Any) -> Piece:
        key = piece_key(canonical_text(module.graph), factors)
        known = self.pieces.get(key)
        if known is not None:
            return known

        def call(values: list[Any]) -> tuple[Any, ...]:
            inputs = list(values)
            values.clear()
            result = fx.Interpreter(module).run(*inputs)
            return tuple(result) if isinstance(result, (tuple, list)) else (result,)

        nothing: dict[str, Any] = dict.fromkeys(("source", "graph_before", "origins"), "")
        artifact = Artifact(
            key=key,
            **nothing,
            kernels={},
            launches={},
            stages=(),
            reports=(),
            gemms=(),
            device="cpu",
            is_checked=True,
        )
        self.pieces[key] = Piece(artifact=artifact, call=call, was_compiled=False)
        return replace(self.pieces[key], was_compiled=True)


@dataclass(frozen=True)
class Outcome:
    """What compiling a world gave: its result, and what is right."""

    compiled: Compiled
    result: Tensor
    eager: Tensor

    @property
    def is_right(self) -> bool:
        return torch.equal(self.result, self.eager)

    @property
    def was_captured(self) -> bool:
        return "capture" in self.compiled.seconds


def compile_world(world: World, store: Store) -> Outcome:
    """The world's program through the compiler, and run as it is written with nothing around it."""
    factor = float(world.value("pass"))
    config = CompileConfig(passes=(*PASS_NAMES, make_pass(factor)), verify=False)
    with world.around() as forward:
        table = {name: (tuple(weight.shape), weight.dtype) for name, weight in WEIGHTS.items()}
        compiled = compile_program(
            Program(forward=forward, parameters=table, device=CPU), config, "fast", store
        )
    with torch.no_grad():
        result = compiled.plan.bind(WEIGHTS, CPU)(*TOKENS, lambda *_: None)
    calm = replace(world, values={part: value for part, value in world.values.items() if part not in FREE})
    with calm.around() as forward, torch.no_grad():
        first = WEIGHTS["embedding"] * factor  # as the pass rewrites `* 1.0`
        eager = forward({"embedding": first}, *TOKENS, None)
    return Outcome(compiled, result, eager)
