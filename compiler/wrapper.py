"""A stored source made callable: by its own few names where they suffice, else as Inductor would run it."""

import ast
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..common.logging import get_logger
from ..common.store import Store
from . import torch_compat

logger = get_logger("compiler")


class ExternKernels:
    """The library routines that generated code calls, by Inductor's names for them."""

    mm = staticmethod(torch.mm)
    bmm = staticmethod(torch.bmm)
    addmm = staticmethod(torch.addmm)
    baddbmm = staticmethod(torch.baddbmm)


def load_source(
    source_digest: str, kernel_digests: Mapping[str, str], store: Store
) -> Callable[[list[Any]], Any]:
    """The `call` of a stored source, its kernels taken from the store.

    Importing Inductor takes seconds that a warm start does not have: only the wrapper function is taken from
    the source, and given the names it uses. A source that uses others is run whole.
    """
    source = store.get(source_digest).decode()
    tree = ast.parse(source)
    wrapper = _find_wrapper(tree)
    paths = {name: store.path(digest) for name, digest in kernel_digests.items()}
    known = torch_compat.wrapper_names() | {"extern_kernels": ExternKernels}
    missing = _names_used(wrapper) - set(known) - set(paths) if wrapper else {"call"}
    if wrapper is None or missing or not _externs_known(wrapper):
        logger.info("source %s uses %s; loading it through Inductor", source_digest[:16], sorted(missing))
        whole = torch_compat.run_source(
            source, f"lamina_source_{source_digest[:16]}", store.outside_folder("inductor")
        )
        call: Callable[[list[Any]], Any] = whole["call"]
        return call
    kernels = {
        name: torch_compat.load_native_kernel(path, f"lamina_{path.name}") for name, path in paths.items()
    }
    namespace: dict[str, Any] = known | kernels
    module = ast.Module(body=[wrapper], type_ignores=[])
    exec(compile(module, f"lamina_source_{source_digest[:16]}", "exec"), namespace)
    if isinstance(wrapper, ast.ClassDef):
        runner = namespace[wrapper.name](partitions=[])
        return runner.call  # type: ignore[no-any-return]
    return namespace["call"]  # type: ignore[no-any-return]


def _find_wrapper(tree: ast.Module) -> ast.ClassDef | ast.FunctionDef | None:
    """The class Runner with its method call, or the function call, as the torch versions write it."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "call":
            return node
        if isinstance(node, ast.ClassDef) and node.name == "Runner":
            return node
    return None


def _names_used(wrapper: ast.AST) -> set[str]:
    """Names that must come from outside: read, and never written or bound as an argument."""
    read: set[str] = set()
    written: set[str] = set()
    for node in ast.walk(wrapper):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else written).add(node.id)
        elif isinstance(node, ast.arg):
            written.add(node.arg)
    return read - written - {"range", "len", "zip", "tuple", "list", "int", "float", "max", "min"}


def _externs_known(wrapper: ast.AST) -> bool:
    used = {
        node.attr
        for node in ast.walk(wrapper)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "extern_kernels"
    }
    return all(hasattr(ExternKernels, name) for name in used)
