"""Rotary positions moved into attention's write of the cache, over the cut between the two."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx

from ..torch_internals import torch_compat
from .graph import Pass, PassReport, copy_graph, is_mutating
from .providers import Choose, choose

SITE, ROTARY = "lamina::attention_site", "lamina::rotary_embedding"
NAME = "rotary_and_write_kv_cache"
SHAPE_READERS = ("size", "new_empty")  # methods that look at a tensor's shape alone


def run(graph: fx.Graph, choose: Choose = choose) -> tuple[fx.Graph, PassReport]:
    graph = copy_graph(graph)
    chosen, skipped = [], []
    for site in [node for node in graph.nodes if torch_compat.op_name(node.target) == SITE]:
        rotary = _rotary_behind(site)
        if rotary is None:
            continue
        reason = _obstacle(site, rotary)
        query = rotary.args[0].meta["example_value"]  # type: ignore[union-attr]
        choice = choose(NAME, query.device, query.dtype)
        if reason or not choice.is_op:
            skipped.append(f"{site.name}: {reason or choice.reason}")
            continue
        chosen.append(f"{site.name}: {choice.reason}")
        _write(graph, site, rotary)
    return graph, PassReport(name=NAME, num_matches=len(chosen), skipped=tuple(skipped), chosen=tuple(chosen))


def _rotary_behind(site: fx.Node) -> fx.Node | None:
    """The rotary_embedding whose query and key a site takes."""
    query, key = site.args[:2]
    sources = [_item_of(query, 0), _item_of(key, 1)]
    return sources[0] if sources[0] is sources[1] else None


def _item_of(value: Any, item: int) -> fx.Node | None:
    """The rotary_embedding of which a value is the item."""
    if value.target is not operator.getitem or value.args[1] != item:
        return None
    source: fx.Node = value.args[0]
    return source if torch_compat.op_name(source.target) == ROTARY else None


def _obstacle(site: fx.Node, rotary: fx.Node) -> str | None:
    if any(angle is not None for angle in site.args[5:]):
        return "rotates already"
    for result in rotary.users:
        readers = [user for user in result.users if user is not site and not _reads_shape(user, result)]
        if readers or result not in site.args[:2]:
            return f"{', '.join(user.name for user in readers) or result.name} needs what is rotated"
    if set(rotary.users) & set(site.args[2:4]):
        return "the value or the output is rotated too"
    between = site.prev
    while between is not rotary:
        if _may_write(between):
            return f"{between.name} may write in between"
        between = between.prev
    return None


def _reads_shape(user: fx.Node, tensor: fx.Node) -> bool:
    is_reader = user.op == "call_method" and user.target in SHAPE_READERS
    return is_reader and user.all_input_nodes.count(tensor) == 1 and user.args[0] is tensor


def _may_write(node: fx.Node) -> bool:
    """Whether a call may change a tensor: any that is not known to change none."""
    if node.op == "call_method":
        return node.target not in SHAPE_READERS
    schema = getattr(node.target, "_schema", None)
    return node.target is not operator.getitem and (schema is None or is_mutating(node))


def _write(graph: fx.Graph, site: fx.Node, rotary: fx.Node) -> None:
    """The site takes the rotation's operands in place of its results, and the angles behind the layer."""
    operands: Any = rotary.args
    query, key, cos, sin = operands
    rotated = {item.args[1]: item for item in rotary.users}
    for item, source in ((0, query), (1, key)):
        rotated[item].replace_all_uses_with(source)
        graph.erase_node(rotated[item])
    site.args = (*site.args[:5], cos, sin)
    graph.erase_node(rotary)


def rotary_and_write_pass(choose: Choose) -> Pass:
    """The pass with another choice of who serves a site."""
    choosing: Callable[[fx.Graph], tuple[fx.Graph, PassReport]] = partial(run, choose=choose)
    return Pass(
        name=NAME,
        version=2,
        reason="the rotated key goes straight to its slot of the cache: one call a layer in place of three",
        contract="bitwise equal: the op in attention's stead rotates with the same rounding",
        run=choosing,
        scope="model",
    )


ROTARY_AND_WRITE = rotary_and_write_pass(choose)
