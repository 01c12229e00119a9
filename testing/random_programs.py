"""Random programs of fragments, traced as Inductor would see them, for any number of tokens."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, fx

from ..compiler.torch_internals import torch_compat
from . import four_bits, fragments, gates, heads, projections, quantized, zero_centred
from .fragments import State, Step

Inputs = tuple[tuple[tuple[int | None, ...], torch.dtype], ...]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TOKEN_COUNTS = (0, 1, 2, 7)
Formulas = Mapping[Any, Callable[..., Any]]
NO_FORMULAS: Formulas = {}
MODULES = (fragments, zero_centred, heads, gates, projections, quantized, four_bits)
PLAIN = {body.__name__: body for module in MODULES for body in module.PLAIN}
ODD = {body.__name__: body for module in MODULES for body in module.ODD}
BODIES = PLAIN | ODD


@dataclass(frozen=True, kw_only=True)
class Program:
    """Fragments one after another on x and a residual, both [T, hidden]."""

    steps: tuple[Step, ...]
    dtype: torch.dtype
    hidden: int
    intermediate: int
    scale: float  # of x and the residual: eps shows where it is small
    seed: int


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A program's graph, its inputs by size (None for the number of tokens) and dtype, the sites planted."""

    program: Program
    graph: fx.Graph
    inputs: Inputs
    sites: Counter[str]

    def values(self, num_tokens: int) -> list[Tensor]:
        """Random inputs, the same at every call."""
        generator = torch.Generator().manual_seed(self.program.seed)
        values = []
        for sizes, dtype in self.inputs:
            scale = self.program.scale if None in sizes else 1.0
            values.append(
                (scale * torch.randn(_shape(sizes, num_tokens), generator=generator, dtype=torch.float64)).to(
                    dtype
                )
            )
        return values

    @functools.cached_property
    def expected(self) -> dict[int, list[Tensor]]:
        """What the graph makes of its inputs, by number of tokens."""
        return {num_tokens: run(self.graph, self.values(num_tokens)) for num_tokens in TOKEN_COUNTS}


def run(graph: fx.Graph, values: list[Tensor], formulas: Formulas = NO_FORMULAS) -> list[Tensor]:
    """What a graph makes of values, node by node and eagerly; some targets by their formula in ATen."""
    return list(results_of(graph, values, formulas)[graph.output_node()])


def results_of(graph: fx.Graph, values: list[Tensor], formulas: Formulas = NO_FORMULAS) -> dict[fx.Node, Any]:
    """The value of every node."""
    known: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), values, strict=True))
    with torch.no_grad():
        for node in graph.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            if node.target in formulas:
                with _Decomposed():
                    known[node] = formulas[node.target](*args, **kwargs)
            elif node.op == "call_function":
                known[node] = node.target(*args, **kwargs)
            elif node.op == "output":
                known[node] = args[0]
    return known


class _Decomposed(torch_compat.DispatchMode):
    """Activations as Inductor spells them: torch's own kernels have exponentials of their own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        formula = _activations().get(func)
        return (formula or func)(*args, **kwargs or {})


@functools.cache
def _activations() -> dict[Any, Callable[..., Any]]:
    aten = torch.ops.aten
    return torch_compat.decompositions(aten.silu.default, aten.gelu.default)


@functools.lru_cache(maxsize=256)
def trace(program: Program) -> Traced:
    """The program in ATen, decomposed, with an unbacked number of tokens."""
    inputs = _find_inputs(program)
    values = torch_compat.tensors_of_any_size(inputs)
    sites: Counter[str] = Counter()
    graph = torch_compat.trace_formula(lambda *given: _replay(program, given, sites), values)
    return Traced(program=program, graph=graph, inputs=inputs, sites=sites)


def _shape(sizes: tuple[int | None, ...], num_tokens: Any) -> list[Any]:
    return [num_tokens if size is None else size for size in sizes]


def _find_inputs(program: Program) -> Inputs:
    """x, the residual, and the weights that the fragments ask for, in their order."""
    rows: tuple[int | None, ...] = (None, program.hidden)
    inputs: list[tuple[tuple[int | None, ...], torch.dtype]] = [(rows, program.dtype)] * 2

    def weight(*shape: int, dtype: torch.dtype = program.dtype) -> Tensor:
        inputs.append((shape, dtype))
        return torch.empty(shape, dtype=dtype, device="meta")

    x, residual = (torch.empty(2, program.hidden, dtype=program.dtype, device="meta") for _ in range(2))
    _call(program, x, residual, weight)
    return tuple(inputs)


def _replay(program: Program, given: tuple[Tensor, ...], sites: Counter[str]) -> tuple[Tensor, ...]:
    """The program's results; the sites planted are counted on the way."""
    x, residual, *weights = given
    remaining = iter(weights)
    state = _call(program, x, residual, lambda *shape, dtype=None: next(remaining))
    sites.update(
        residual_barrier=state.barriers,
        add_rms_norm=state.sum_norms,
        rms_norm=state.norms,
        fused_norms=state.fused_norms,
        qk_norm=state.head_norms,
        silu_and_mul=state.gates,
        gelu_and_mul=state.gelus,
        linear=state.linears,
        add_rms_norm_linear=state.fused,
        linear_silu_and_mul=state.linear_gates,
        fused_gates=state.fused_gates,
        rms_norm_quantized=state.norms_quantized,
        act_and_mul_quantized=state.gates_quantized,
        mlp_w8a8=state.mlps_w8a8,
        gated_w4a16=state.gates_w4a16,
    )
    return (state.x, state.residual, *state.extras)


def _call(program: Program, x: Tensor, residual: Tensor, weight: Callable[..., Tensor]) -> State:
    state = State(
        x=x,
        residual=residual,
        weight=weight,
        dtype=program.dtype,
        hidden=program.hidden,
        intermediate=program.intermediate,
    )
    for step in program.steps:
        BODIES[step.kind](state, step)
    return state


@st.composite
def programs(draw: st.DrawFn, kinds: tuple[str, ...] | None = None, max_steps: int = 3) -> Program:
    """Any program; with kinds, one of these fragments only. Without, plain ones are as likely as odd ones."""
    if kinds is None:
        kind = st.one_of(st.sampled_from(sorted(PLAIN)), st.sampled_from(sorted(ODD)))
    else:
        kind = st.sampled_from(kinds)
    step = st.builds(
        Step,
        kind=kind,
        eps=st.sampled_from((1e-5, 1e-6, 1e-2, 0.5, 1)),
        swapped=st.booleans(),
        squared=st.booleans(),
    )
    return Program(
        steps=tuple(draw(st.lists(step, min_size=1, max_size=max_steps))),
        dtype=draw(st.sampled_from(DTYPES)),
        hidden=draw(st.sampled_from((2, 8, 10, 64))),
        intermediate=draw(st.sampled_from((1, 3, 16))),
        scale=draw(st.sampled_from((1.0, 1e-3, 30.0))),
        seed=draw(st.integers(0, 2**16)),
    )
