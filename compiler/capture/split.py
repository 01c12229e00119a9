"""The captured graph cut at attention: pieces that only compute, and the calls between them."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...common.errors import CompileError
from .fingerprint import source_line
from .functionalize import is_attention, recompute_sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceCall:
    """One piece and the names of the values it takes and gives."""

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """attend(layer, query, key, value, out) or with cos, sin behind them, by the names of the values."""

    layer: int
    tensors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitModel:
    """Straight-line calls; every value has one name, a weight or input keeps its own."""

    calls: tuple[PieceCall | AttentionCall, ...]
    result: str
    rows: Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of a token's row, of values

    @property
    def pieces(self) -> tuple[PieceCall, ...]:
        return tuple(call for call in self.calls if isinstance(call, PieceCall))


def split(module: fx.GraphModule, input_names: Mapping[str, str]) -> SplitModel:
    """Cut at every attention marker; a piece gives exactly what later calls or the result use."""
    recompute_sizes(module.graph, _assign_pieces)
    nodes, owner = _computed(module.graph), _assign_pieces(module.graph)
    names = {node: input_names.get(node.name, f"%{node.name}") for node in module.graph.nodes}
    _check_layers([node for node in nodes if is_attention(node)])
    calls: list[PieceCall | AttentionCall] = []
    for index in range(max(owner.values(), default=-1) + 1):
        members = [node for node in nodes if owner[node] == index]
        if is_attention(members[0]):
            calls.append(_attention_call(members[0], names))
        else:
            calls.append(_piece_call(members, names))
    (results,) = module.graph.output_node().args
    if not isinstance(results, (tuple, list)) or len(results) != 1 or not isinstance(results[0], fx.Node):
        raise CompileError(f"a model's forward must compute one tensor; the captured graph returns {results}")
    if results[0].op == "placeholder":
        raise CompileError(f"a model's forward must compute what it returns; it returns {names[results[0]]}")
    rows = {names[node]: row for node in nodes if (row := _row_of(node)) is not None}
    return SplitModel(calls=tuple(calls), result=names[results[0]], rows=rows)


def _computed(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def _check_layers(sites: list[fx.Node]) -> None:
    """Each layer has keys and values of its own, found by its number."""
    seen: set[object] = set()
    for site in sites:
        layer = site.args[4] if len(site.args) > 4 else None
        if layer in seen or not isinstance(layer, int) or layer < 0:
            raise CompileError(
                f"attend is called {'twice ' if layer in seen else ''}with layer {layer}; wanted once for "
                f"each layer, numbered from 0{source_line(site)}"
            )
        seen.add(layer)


def _assign_pieces(graph: fx.Graph) -> dict[fx.Node, int]:
    """The number of each node's piece, one more after every marker; items of a tuple stay with the tuple."""
    owner: dict[fx.Node, int] = {}
    current, opened = -1, False
    for node in _computed(graph):
        producer = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(producer, fx.Node) and _is_tuple(producer):
            owner[node] = owner[producer]
        elif is_attention(node):
            current, opened = current + 1, False
            owner[node] = current
        else:
            if not opened:
                current, opened = current + 1, True
            owner[node] = current
    return owner


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), (tuple, list)) and not isinstance(
        node.meta.get("example_value"), torch.Size
    )


def _row_of(node: fx.Node) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Shape and dtype of a row of a contiguous tensor with one for each token; None for all else."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or not value.dim() or not isinstance(value.shape[0], torch.SymInt):
        return None
    row = tuple(value.shape[1:])
    is_plain = all(isinstance(size, int) for size in row) and value.stride() == _strides_of(row)
    return (row, value.dtype) if is_plain else None


def _strides_of(row: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of rows that lie one behind the other."""
    strides = [1]
    for size in reversed(row):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def _attention_call(node: fx.Node, names: Mapping[fx.Node, str]) -> AttentionCall:
    layer: Any = node.args[4]
    tensors = [value for value in (*node.args[:4], *node.args[5:]) if isinstance(value, fx.Node)]
    if len(tensors) not in (4, 6):
        raise CompileError(
            f"attention marker with arguments {node.args}; wanted query, key, value, out, layer, cos, sin"
        )
    return AttentionCall(layer=layer, tensors=tuple(names[tensor] for tensor in tensors))


def _piece_call(members: list[fx.Node], names: Mapping[fx.Node, str]) -> PieceCall:
    inside = set(members)
    inputs = [source for node in members for source in node.all_input_nodes if source not in inside]
    inputs = list(dict.fromkeys(inputs))
    outputs = [node for node in members if any(user not in inside for user in node.users)]
    return PieceCall(
        graph=_extract(members, inputs, outputs),
        inputs=tuple(names[node] for node in inputs),
        outputs=tuple(names[node] for node in outputs),
    )


def _extract(members: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> fx.GraphModule:
    """The members as a graph of their own, with inputs renamed so that equal pieces read equally."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for position, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"arg{position}")
        copies[node].meta = dict(node.meta)
    for node in members:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    module = fx.GraphModule(torch.nn.Module(), graph)
    for node in outputs:
        if not isinstance(node.meta.get("example_value"), torch.Tensor):
            raise CompileError(
                f"{node.name} ({node.meta.get('example_value')}) would cross a cut; only tensors may"
            )
    return module
