"""What a pass is, and the few things every pass does to a graph."""

import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from ..numerics import Numerics
from ..torch_internals import torch_compat


@dataclass(frozen=True, kw_only=True, slots=True)
class PassReport:
    """What one pass did to one graph: sites rewritten, and sites left alone with the reason."""

    name: str
    num_matches: int
    skipped: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()  # sites given to an op's own kernels, where there was a choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """A named rewrite. `run` changes nothing it is given; `contract` says what may differ in the result.

    A new version is a new cache key: raise it whenever the rewritten graph can differ. A pass over the whole
    model runs on the captured graph before it is cut at attention, every other one on the ATen of a piece.
    """

    name: str
    version: int
    reason: str
    contract: str
    run: Callable[[fx.Graph], tuple[fx.Graph, PassReport]]
    scope: Literal["model", "piece"] = "piece"
    numerics: tuple[Numerics, ...] = ("fast", "exact")  # the modes that allow what the contract says


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """The same nodes in a graph of their own, meta included."""
    copies: dict[fx.Node, fx.Node] = {}
    copy = fx.Graph()
    for node in graph.nodes:
        copies[node] = copy.node_copy(node, copies.__getitem__)
    return copy


def is_same(one: fx.Graph, other: fx.Graph) -> bool:
    """Whether two graphs hold the same calls of the same values in the same order, whatever their names."""
    left, right = (
        {node: (fx.Node, position) for position, node in enumerate(graph.nodes)} for graph in (one, other)
    )
    if len(left) != len(right):
        return False
    pairs = zip(left, right, strict=True)
    return all(_calls_alike(node, left, copy, right) for node, copy in pairs)


def _calls_alike(
    node: fx.Node, positions: Mapping[fx.Node, Any], copy: fx.Node, others: Mapping[fx.Node, Any]
) -> bool:
    if (node.op, node.target) != (copy.op, copy.target):
        return False
    try:
        return _operands(node, positions) == _operands(copy, others)
    except TypeError:  # of what no pass could look up, nothing is known
        return False


def _operands(node: fx.Node, positions: Mapping[fx.Node, Any]) -> object:
    """What a call is given, with nodes by their positions."""
    return frozen(fx.map_arg((node.args, node.kwargs), positions.__getitem__))


def emit(graph: fx.Graph, before: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """A new call in front of a node, with the shape and dtype that it will have."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    node.meta["val"] = torch_compat.fake_result(target, args, kwargs)
    return node


def replace(old: fx.Node, new: fx.Node) -> None:
    """Let every user of one node use another in its place; the old one is left to erase_dead."""
    new.meta.setdefault("stack_trace", old.meta.get("stack_trace"))
    old.replace_all_uses_with(new)


def erase_dead(graph: fx.Graph) -> int:
    """Remove calls that nobody uses and that change nothing; how many."""
    dead = 0
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not (is_mutating(node) or node.is_impure()):
            graph.erase_node(node)
            dead += 1
    return dead


def is_mutating(node: fx.Node) -> bool:
    """Whether a call writes into one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def is_view(node: fx.Node) -> bool:
    """Whether a call's result is, or may be, memory of its argument."""
    schema = getattr(node.target, "_schema", None)
    aliases = schema is not None and any(result.alias_info is not None for result in schema.returns)
    return aliases or node.target in (operator.getitem, torch.ops.aten._unsafe_view.default)


def frozen(value: object) -> object:
    """A hashable stand-in, equal only for what computes the same; TypeError for what cannot be hashed.

    1, 1.0 and True stay apart, as do 0.0 and -0.0, and a NaN equals itself.
    """
    if isinstance(value, (list, tuple)):
        return (list, *(frozen(item) for item in value))
    if isinstance(value, dict):
        return (dict, *((key, frozen(item)) for key, item in sorted(value.items())))
    if isinstance(value, slice):
        return (slice, frozen((value.start, value.stop, value.step)))
    if isinstance(value, complex):
        return (complex, frozen(value.real), frozen(value.imag))
    bits = struct.pack("<d", value) if isinstance(value, float) else value
    hash(bits)
    return (type(value), bits)


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The dtype of a node's tensor, or None where it is not one."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def shape_of(node: fx.Node) -> Sequence[Any]:
    """The shape of a node's tensor, symbols included; () where it is not one."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def is_row_major(node: fx.Node) -> bool:
    """Whether a node's tensor lies as our ops lay out theirs: dense, the last dimension innermost."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    stride: Any = 1
    for size, given in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        is_single = isinstance(size, int) and size == 1  # a symbol must not be compared: that would guard
        if str(given) != str(stride) and not is_single:
            return False
        stride = stride * size
    return True
