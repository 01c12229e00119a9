"""One spelling for each thing: no conversion to the same dtype, no repeated pure call, no dead call."""

import torch
from torch import fx

from ..torch_internals import torch_compat
from .graph import Pass, PassReport, copy_graph, dtype_of, erase_dead, frozen, is_mutating, is_view, shape_of

CONVERT = torch.ops.prims.convert_element_type.default
VIEWS = (torch.ops.aten.view.default, torch.ops.aten.expand.default)


def run(graph: fx.Graph) -> tuple[fx.Graph, PassReport]:
    graph = copy_graph(graph)
    shown = _shown(graph)
    matches = _drop_idle_calls(graph, shown) + _merge_repeated_calls(graph, shown) + erase_dead(graph)
    return graph, PassReport(name=CANONICALISE.name, num_matches=matches)


def _shown(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose memory the caller gets, outputs and what they view; none may come to share it."""
    shown: set[fx.Node] = set()
    waiting = list(graph.output_node().all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node not in shown:
            shown.add(node)
            waiting += node.all_input_nodes if is_view(node) else []
    return shown


def _drop_idle_calls(graph: fx.Graph, shown: set[fx.Node]) -> int:
    dropped = 0
    for node in list(graph.nodes):
        if node.op == "call_function" and _is_idle(node) and (is_view(node) or node not in shown):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            dropped += 1
    return dropped


def _is_idle(node: fx.Node) -> bool:
    """Whether a call converts to the dtype, or views as the shape and strides, that its operand has."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return False
    if node.target is CONVERT:
        return dtype_of(source) is not None and dtype_of(source) == dtype_of(node)
    # An input returned as an output would alias it; a view of an input is kept for that reason.
    is_view = node.target in VIEWS and source.op == "call_function"
    return is_view and torch_compat.same_layout(source.meta.get("val"), node.meta.get("val"))


def _merge_repeated_calls(graph: fx.Graph, shown: set[fx.Node]) -> int:
    """Equal pure calls on equal arguments become one; two that the caller is shown stay apart."""
    merged = 0
    first: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if (
            node.op != "call_function"
            or is_mutating(node)
            or not node.all_input_nodes
            or torch_compat.is_random(node.target)
        ):
            continue
        key = _key(node)
        if key is None:
            continue
        original = first.setdefault(key, node)
        if original is not node and (is_view(node) or not {node, original} <= shown):
            shown |= {original} if node in shown else set()
            node.replace_all_uses_with(original)
            graph.erase_node(node)
            merged += 1
    return merged


def _key(node: fx.Node) -> object | None:
    try:
        key = (node.target, frozen(node.args), frozen(node.kwargs), dtype_of(node), str(shape_of(node)))
    except TypeError:
        return None
    return key


CANONICALISE = Pass(
    name="canonicalise",
    version=2,
    reason="later passes meet each formula in one spelling, and equal pieces read equally",
    contract="bitwise equal",
    run=run,
)
