"""SiLU or GELU of one half times the other half, recognised in ATen and named as one op."""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .graph import Pass, PassReport, copy_graph, dtype_of, emit, erase_dead, is_row_major, replace, shape_of
from .match import Any_, Call, Match, find

ATEN = torch.ops.aten
CONVERT = (torch.ops.prims.convert_element_type.default,)
ADD, MUL = (ATEN.add.Tensor,), (ATEN.mul.Tensor,)


def _silu(gate: Any) -> Call:
    denominator = Call(ADD, (Call((ATEN.exp.default,), (Call((ATEN.neg.default,), (gate,)),)), 1))
    return Call((ATEN.div.Tensor,), (gate, denominator))


def _gelu(gate: Any) -> Call:
    """GELU by its tanh formula, as torch spells it; the constants are those of the op."""
    cube = Call(MUL, (Call(MUL, (gate, gate)), gate))
    inner = Call(MUL, (Call(ADD, (gate, Call(MUL, (cube, 0.044715)))), math.sqrt(2 / math.pi)))
    return Call(MUL, (Call(MUL, (gate, 0.5)), Call(ADD, (Call((ATEN.tanh.default,), (inner,)), 1))))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node)


GATE, UP = Any_("gate", _is_tensor), Any_("up", _is_tensor)


def _patterns(act: Callable[[Any], Call]) -> tuple[Call, ...]:
    """The activation of the gate times up, computed in float32 and rounded, or in the dtype it comes in."""
    rounded = Call(CONVERT, (act(Call(CONVERT, (GATE, torch.float32))), Any_("rounded_to")))
    return tuple(Call(MUL, (active, UP), commutes=True) for active in (rounded, act(GATE)))


SILU_PATTERNS, GELU_PATTERNS = _patterns(_silu), _patterns(_gelu)


def run_silu_and_mul(graph: fx.Graph) -> tuple[fx.Graph, PassReport]:
    return _run(graph, SILU_AND_MUL.name, SILU_PATTERNS, torch.ops.lamina.silu_and_mul.default)


def run_gelu_and_mul(graph: fx.Graph) -> tuple[fx.Graph, PassReport]:
    return _run(graph, GELU_AND_MUL.name, GELU_PATTERNS, torch.ops.lamina.gelu_and_mul.default)


def _run(graph: fx.Graph, name: str, patterns: tuple[Call, ...], op: Any) -> tuple[fx.Graph, PassReport]:
    graph = copy_graph(graph)
    matches, skipped = 0, []
    for node in graph.find_nodes(op="call_function", target=ATEN.mul.Tensor):
        match = next((match for pattern in patterns if (match := find(pattern, node))), None)
        if match is None:
            continue
        reason = _obstacle(match)
        if reason:
            skipped.append(f"{node.name}: {reason}")
            continue
        whole = match.bound["gate"].args[0].args[0]
        replace(node, emit(graph, node, op, whole))
        matches += 1
    erase_dead(graph)
    return graph, PassReport(name=name, num_matches=matches, skipped=tuple(skipped))


def _obstacle(match: Match) -> str | None:
    gate, up, result = match.bound["gate"], match.bound["up"], match.root
    if not _are_halves(gate, up):
        return (
            "gate and up are not the two halves of one tensor's last dimension; as sources of one parameter "
            "they would be"
        )
    dtypes = {dtype_of(node) for node in (gate, up, result)}
    if len(dtypes) != 1:
        return f"mixed dtypes {sorted(str(dtype) for dtype in dtypes)}"
    if match.bound.get("rounded_to", dtype_of(result)) != dtype_of(result):
        return "rounds to another dtype than it returns"
    if dtype_of(result) in (torch.bfloat16, torch.float16) and "rounded_to" not in match.bound:
        return "computes in a narrow dtype, the op in float32"
    if dtype_of(result) == torch.float64 and "rounded_to" in match.bound:
        return "computes in float32, the op in float64"
    if not is_row_major(result):
        return "laid out otherwise than row by row, as the op's result is"
    return None


def _are_halves(gate: fx.Node, up: fx.Node) -> bool:
    """Whether both are items 0 and 1 of one split of the last dimension into two equal parts."""
    if gate.target is not operator.getitem or up.target is not operator.getitem:
        return False
    if gate.args[0] is not up.args[0] or (gate.args[1], up.args[1]) != (0, 1):
        return False
    split = gate.args[0]
    if not isinstance(split, fx.Node) or split.target not in (
        ATEN.split.Tensor,
        ATEN.split_with_sizes.default,
    ):
        return False
    whole: Any = split.args[0]
    dim = split.args[2] if len(split.args) > 2 else 0
    rank = len(shape_of(whole)) if isinstance(whole, fx.Node) else 0
    if rank == 0 or dim not in (-1, rank - 1):
        return False
    sizes = {str(shape_of(half)[-1]) for half in (gate, up)}
    return len(sizes) == 1 and str(shape_of(whole)[-1]) == str(2 * shape_of(gate)[-1])


SILU_AND_MUL = Pass(
    name="silu_and_mul",
    version=1,
    reason="one site with one provider between the two GEMMs of the MLP",
    contract="bitwise equal to the ATen graph it replaces; eager SiLU in float32 may differ in the last bit",
    run=run_silu_and_mul,
)
GELU_AND_MUL = Pass(
    name="gelu_and_mul",
    version=1,
    reason="the same of models whose gate is a GELU",
    contract="bitwise equal to the ATen graph it replaces; eager GELU in float32 may differ in the last bits",
    run=run_gelu_and_mul,
)
