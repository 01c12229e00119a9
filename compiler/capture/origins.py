"""Which line of the model's code each operation of a graph comes from."""

import re
from pathlib import Path

from torch import fx

from ..torch_internals import torch_compat

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<number>\d+), in .*\n\s*(?P<line>.*)')


def origins(graph: fx.Graph) -> list[dict[str, object]]:
    """Each line in the order of the graph: `place` (folder/file:number), its text, and the operations.

    Places hold no more than a folder and a file, so that they are the same wherever the model lies.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            found.setdefault(_origin(node), []).append(_name(node))
    return [
        {"place": place, "line": line, "operations": operations}
        for (place, line), operations in found.items()
    ]


def _origin(node: fx.Node) -> tuple[str, str]:
    """The innermost frame that Dynamo saw when the model asked for the operation."""
    frames = list(FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not frames:
        return "", "no line is known"
    last = frames[-1]
    return f"{'/'.join(Path(last['file']).parts[-2:])}:{last['number']}", last["line"].strip()


def _name(node: fx.Node) -> str:
    """The operation by its name; getitem and sizes by Python's."""
    return torch_compat.op_name(node.target) or getattr(node.target, "__name__", str(node.target))
