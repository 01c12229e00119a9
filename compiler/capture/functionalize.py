"""Functionalization of a captured graph: writes that cross a split become values, sizes are computed anew."""

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ...common.errors import CompileError
from ..torch_internals import torch_compat
from .fingerprint import source_line

ATTENTION = "lamina::attention_site"
UPDATES = {
    getattr(operator, f"i{name}")
    for name in (
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
} | {operator.setitem}


def is_attention(node: fx.Node) -> bool:
    """Whether a node is the attention marker, in whichever way the tracer wrote its target."""
    return node.op == "call_function" and torch_compat.op_name(node.target) == ATTENTION


def functionalize(graph: fx.Graph) -> None:
    """Let every write into a value that lives across an attention call go to a copy that takes its place.

    Raises CompileError for a write into a weight or an input, and for one whose value is seen through another
    view behind the cut, since a copy would leave that view behind.
    """
    for node in list(graph.nodes):
        written = written_value(node)
        if written is not None and isinstance(written.meta.get("example_value"), Tensor):
            _redirect(graph, node, written)


def written_value(node: fx.Node) -> fx.Node | None:
    """The value that a node changes in place, None where it changes none that is known of."""
    if node.op not in ("call_function", "call_method") or is_attention(node):
        return None
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return out
    first = node.args[0] if node.args else node.kwargs.get("input")
    return first if isinstance(first, fx.Node) and _writes_first(node) else None


def _writes_first(node: fx.Node) -> bool:
    if isinstance(node.target, str):
        return node.op == "call_method" and _is_in_place(node.target)
    if node.target in UPDATES or _is_in_place(getattr(node.target, "__name__", "").split(".")[0]):
        return True
    return bool(_argument(node, "inplace"))


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _argument(node: fx.Node, name: str) -> object:
    """A named argument of a call of a Python function, however it was given."""
    target: Any = node.target
    if name in node.kwargs or not inspect.isfunction(target):
        return node.kwargs.get(name)
    return inspect.signature(target).bind(*node.args, **node.kwargs).arguments.get(name)


def _redirect(graph: fx.Graph, node: fx.Node, written: fx.Node) -> None:
    order = {member: position for position, member in enumerate(graph.nodes)}
    family = [member for member in graph.nodes if _shares_memory(member, written)]
    _refuse_inputs(node, family)
    earlier = [member for member in family if order[member] < order[node]]
    cuts = [order[member] for member in graph.nodes if is_attention(member)]
    if not any(order[member] < cut < order[node] for member in earlier for cut in cuts):
        return  # all in one piece, where code generation sees to it
    others = [member for member in earlier if not _is_alike(member, written)]
    seen = [view for view in others if any(order[user] >= order[node] for user in view.users)]
    if seen:
        raise CompileError(
            f"{node.name} writes into {written.name}, which {seen[0].name} is a view of across an attention "
            f"call; wanted a new tensor{source_line(node)}"
        )
    with graph.inserting_before(node):
        copy = graph.call_method("clone", (written,))
    copy.meta = {**written.meta, "example_value": written.meta["example_value"].clone()}
    for member in earlier:
        if _is_alike(member, written):
            member.replace_all_uses_with(copy, lambda user: order.get(user, -1) >= order[node])
    for member in family:
        if order[member] >= order[node] and _is_alike(member, written):
            member.meta = {**member.meta, "example_value": copy.meta["example_value"]}


def _refuse_inputs(node: fx.Node, family: Iterable[fx.Node]) -> None:
    given = next((member for member in family if member.op == "placeholder"), None)
    if given is not None:
        raise CompileError(
            f"{node.name} writes into a weight or an input of the model ({given.name}); wanted a new "
            f"tensor{source_line(node)}"
        )


def _shares_memory(node: fx.Node, other: fx.Node) -> bool:
    one, two = node.meta.get("example_value"), other.meta.get("example_value")
    return (
        isinstance(one, Tensor)
        and isinstance(two, Tensor)
        and torch_compat.memory_of(one) == torch_compat.memory_of(two)
    )


def _is_alike(node: fx.Node, other: fx.Node) -> bool:
    """Whether two values of the same memory are the same tensor, no other view of it."""
    one, two = node.meta["example_value"], other.meta["example_value"]
    return one is two or (
        str(one.shape) == str(two.shape)
        and str(one.stride()) == str(two.stride())
        and str(one.storage_offset()) == str(two.storage_offset())
    )


def recompute_sizes(graph: fx.Graph, piece_of: Callable[[fx.Graph], Mapping[fx.Node, int]]) -> None:
    """Let every piece compute the sizes that it uses, from tensors and the number of tokens.

    piece_of gives the number of the piece that each node is of.
    """
    owner = piece_of(graph)
    for node in list(graph.nodes):
        sizes = [source for source in node.all_input_nodes if _is_size(source) and source in owner]
        for size in sizes:
            if node in owner and owner[size] != owner[node]:
                node.replace_input_with(size, _copied(graph, size, node, {}))


def _copied(graph: fx.Graph, size: fx.Node, before: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
    """A size computed once more in front of a node, back to the tensors that it is of."""
    if size.op == "placeholder" or not _is_size(size):
        return size
    if size not in known:
        for source in size.all_input_nodes:
            known[source] = _copied(graph, source, before, known)
        with graph.inserting_before(before):
            known[size] = graph.node_copy(size, lambda source: known[source])
    return known[size]


def _is_size(node: fx.Node) -> bool:
    """Whether a value is a size, a comparison of sizes, or a shape."""
    value = node.meta.get("example_value")
    return torch_compat.is_scalar(value) or isinstance(value, torch.Size)
