"""What a generated source launches, in order: by whom each launch is served, and the bytes it has to move."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...common.store import Store
from ..codegen.inductor import Artifact
from ..codegen.wrapper_form import find_wrapper

PLACEHOLDER = re.compile(r"placeholder \(\) : (\w+)\[")
CPP, TRITON, LIBRARY, OURS = "Inductor, C++", "Inductor, Triton", "the library", "Lamina's op"


@dataclass(frozen=True, slots=True)
class Size:
    """The bytes of a tensor: some for each token, or a fixed number."""

    per_token: int
    fixed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One call of a kernel; the sizes of all it is given, tables of which it reads a few rows included."""

    name: str
    provider: str
    sizes: tuple[Size, ...]
    num_registers: int | None = None  # of a thread, where the kernel says

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that it has to move for so many tokens."""
        return sum(size.per_token * num_tokens + size.fixed for size in self.sizes)


def launches(artifact: Artifact, store: Store) -> tuple[Launch, ...]:
    """The launches of one call of a piece, in order."""
    wrapper = find_wrapper(ast.parse(store.get(artifact.source).decode()))
    if wrapper is None:
        return ()
    dtypes = PLACEHOLDER.findall(store.get(artifact.graph_before).decode())
    return tuple(_Walk(dtypes, artifact).run(wrapper))


class _Walk:
    """Goes through the statements of the wrapper, knowing the size of every buffer it has met."""

    def __init__(self, dtypes: list[str], artifact: Artifact) -> None:
        self.itemsizes: dict[str, int] = {}
        self.shapes: dict[str, list[int | None]] = {}  # None: the number of tokens
        self.dtypes = dtypes
        self.artifact = artifact

    def run(self, wrapper: ast.AST) -> Iterator[Launch]:
        """Every launch in order."""
        body = next(node for node in ast.walk(wrapper) if _is_call_function(node))
        for node in ast.walk(body):  # statements of a block come in order
            if isinstance(node, ast.Assign):
                yield from self._assign(node.targets[0], node.value)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                yield from self._call(node.value, "")

    def _assign(self, target: ast.expr, value: ast.expr) -> Iterator[Launch]:
        if isinstance(target, (ast.Tuple, ast.List)):
            names = [name.id for name in target.elts if isinstance(name, ast.Name)]
            if len(names) == len(self.dtypes):  # the arguments, in the order of the graph's
                self.itemsizes |= {
                    name: _itemsize(dtype) for name, dtype in zip(names, self.dtypes, strict=True)
                }
            return
        if not isinstance(target, ast.Name):
            return
        source = _name_of(value)
        if isinstance(value, ast.Call) and _function(value).startswith("empty_strided"):
            self.shapes[target.id] = _shape(value.args[0])
            self.itemsizes[target.id] = _itemsize(ast.unparse(value.args[2]).removeprefix("torch."))
        elif source in self.itemsizes:
            self.itemsizes[target.id] = self.itemsizes[source]
            if (shape := self._shape_of(value)) is not None:
                self.shapes[target.id] = shape
        elif isinstance(value, ast.Call):
            yield from self._call(value, target.id)

    def _call(self, call: ast.Call, result: str) -> Iterator[Launch]:
        function = _function(call)
        name = function.removesuffix(".run").removesuffix(".default")
        if name.startswith("assert_"):
            self._learn(name, call.args)
            return
        provider = self._provider(name)
        if provider is None:
            return
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        sizes = {ast.unparse(value): size for value in given if (size := self._size(value)) is not None}
        if result and given and (itemsize := self.itemsizes.get(_name_of(given[0]))):
            self.itemsizes[result] = itemsize
        record = self.artifact.launches.get(name, {})
        yield Launch(
            name=name,
            provider=provider,
            sizes=tuple(sizes.values()),
            num_registers=record.get("num_registers"),
        )

    def _learn(self, assertion: str, given: list[ast.expr]) -> None:
        """Learn the shapes that an assertion states, of one buffer or of a group of them."""
        if not assertion.startswith(("assert_size_stride", "assert_tensor_metadata")):
            return
        buffers, shapes = [given[0]], [given[1]]
        if isinstance(given[0], ast.Tuple) and isinstance(given[1], ast.Tuple):
            buffers, shapes = given[0].elts, given[1].elts
        for buffer, shape in zip(buffers, shapes, strict=False):
            if isinstance(buffer, ast.Name):
                self.shapes.setdefault(buffer.id, _shape(shape))

    def _provider(self, name: str) -> str | None:
        if name in self.artifact.kernels:
            return CPP
        if name.startswith("triton_"):
            return TRITON
        if name.startswith("extern_kernels."):
            return LIBRARY
        return OURS if name.startswith("torch.ops.lamina.") else None

    def _size(self, value: ast.expr) -> Size | None:
        shape, itemsize = self._shape_of(value), self.itemsizes.get(_name_of(value))
        if shape is None or itemsize is None:
            return None
        number = itemsize
        for size in shape:
            number *= 1 if size is None else size
        return Size(number, 0) if None in shape else Size(0, number)

    def _shape_of(self, value: ast.expr) -> list[int | None] | None:
        if isinstance(value, ast.Call) and _function(value) == "reinterpret_tensor":
            return _shape(value.args[1])
        return self.shapes.get(_name_of(value))


def _is_call_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "call"


def _function(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _name_of(value: ast.expr) -> str:
    """The buffer behind an expression: itself, an item of it, or another view of it."""
    while isinstance(value, (ast.Call, ast.Subscript)):
        if isinstance(value, ast.Subscript):
            value = value.value
        elif _function(value) == "reinterpret_tensor":
            value = value.args[0]
        else:
            return ""
    return value.id if isinstance(value, ast.Name) else ""


def _shape(value: ast.expr) -> list[int | None]:
    sizes = value.elts if isinstance(value, ast.Tuple) else []
    return [
        size.value if isinstance(size, ast.Constant) and isinstance(size.value, int) else None
        for size in sizes
    ]


def _itemsize(dtype: str) -> int:
    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize
