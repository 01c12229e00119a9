"""Canonical text of a graph: equal text means equal computation, whatever its names and weights."""

import hashlib
import re
from collections.abc import Iterable

import torch
from torch import fx

from ...common.errors import CompileError
from ..torch_internals import torch_compat

OWN = "/lamina/compiler/"  # in the path of a file of this package
_SYMBOL = re.compile(r"\b(?:[us]|zu?f)\d+\b")


def canonical_text(graph: fx.Graph) -> str:
    """One line a node: number, target by module and name, arguments, layout and dtype of the result."""
    numbers = {node: f"%{number}" for number, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        arguments = ", ".join(_argument(value, numbers) for value in node.args)
        keywords = "".join(
            f", {key}={_argument(value, numbers)}" for key, value in sorted(node.kwargs.items())
        )
        target = "" if node.op in ("placeholder", "output") else _target(node)
        lines.append(f"{numbers[node]} = {node.op} {target}({arguments}{keywords}){describe(node)}")
    return _one_symbol("\n".join(lines))


def fingerprint(text: str) -> str:
    """A short name for a canonical text; texts, not names, decide equality."""
    return hashlib.sha256(text.encode()).hexdigest()


def group_equal(texts: Iterable[str]) -> list[int]:
    """For each text the index of the first one equal to it."""
    first: dict[str, int] = {}
    return [first.setdefault(text, index) for index, text in enumerate(texts)]


def _target(node: fx.Node) -> str:
    """The target's module and name; not its repr, which holds addresses that differ between processes."""
    return str(node.target) if isinstance(node.target, str) else torch_compat.qualified_name(node.target)


def _argument(value: object, numbers: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return numbers[value]
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_argument(item, numbers) for item in value) + ")"
    if isinstance(value, slice):
        return f"slice{_argument((value.start, value.stop, value.step), numbers)}"
    if isinstance(value, torch.Tensor):
        raise CompileError(
            "a tensor constant stands in the graph; a model must take every tensor from its weights"
        )
    if callable(value) and not isinstance(value, type(torch.float32)):
        return torch_compat.qualified_name(value)
    return str(value) if isinstance(value, (torch.dtype, torch.device, torch.SymInt)) else repr(value)


def describe(node: fx.Node) -> str:
    """Dtype, shape, strides and device of a node's tensors, or the size that it stands for."""
    value = node.meta.get("val", node.meta.get("example_value"))
    values = value if isinstance(value, (tuple, list)) else (value,)
    described = [
        f"{item.dtype}{list(item.shape)}{list(item.stride())}@{item.device.type}"
        if isinstance(item, torch.Tensor)
        else str(item)
        for item in values
        if isinstance(item, torch.Tensor) or torch_compat.is_scalar(item)
    ]
    return " : " + " ".join(described).replace("torch.", "") if described else ""


def symbols(text: str) -> set[str]:
    """The symbolic sizes and numbers that a text names."""
    return set(_SYMBOL.findall(text))


def source_line(node: fx.Node) -> str:
    """Where the model's code asked for a node, as the end of a message; "" where that is not known."""
    frames = (node.meta.get("stack_trace") or "").split("  File ")
    return "" if OWN in frames[-1] or len(frames) == 1 else "\n  File " + frames[-1].rstrip()


def _one_symbol(text: str) -> str:
    """Every piece has one symbolic size, T; two would mean that the trace was split badly."""
    if len(symbols(text)) > 1:
        raise CompileError(
            f"a piece has the symbolic sizes {sorted(symbols(text))}; wanted one, the number of tokens"
        )
    return _SYMBOL.sub("T", text)
