"""A stored source made callable: by its own few names where they suffice, else as Inductor would run it."""

import ast
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ..common.errors import KernelLaunchError
from ..common.logging import get_logger
from ..common.store import Store
from ..custom_ops.library import direct_call
from ..custom_ops.recording import noted, placed
from . import torch_compat
from .launch import Launcher, read_kernel

logger = get_logger("compiler")


class ExternKernels:
    """The library routines that generated code calls, by Inductor's names for them."""

    mm = staticmethod(torch.mm)
    bmm = staticmethod(torch.bmm)
    addmm = staticmethod(torch.addmm)
    baddbmm = staticmethod(torch.baddbmm)


def load_source(
    source_digest: str,
    kernels: Mapping[str, str],
    launches: Mapping[str, Any],
    store: Store,
    device: torch.device,
) -> Callable[[list[Any]], Any]:
    """The `call` of a stored source, its kernels taken from the store.

    Importing Inductor takes seconds that a warm start does not have: only the wrapper function is taken from
    the source, and given the names it uses. A source that uses others is run whole.
    """
    source, name = store.get(source_digest).decode(), f"lamina_source_{source_digest[:16]}"
    paths = {kernel: store.path(digest) for kernel, digest in kernels.items()}
    why = obstacle(source, {*kernels, *launches})
    if why is None:
        try:
            launchers = {
                key: Launcher(read_kernel(record), store, device) for key, record in launches.items()
            }
            loaded = {
                key: torch_compat.load_native_kernel(path, f"lamina_{path.name}")
                for key, path in paths.items()
            }
            return _call_of(source, name, loaded | launchers, device)
        except KernelLaunchError as error:
            why = str(error)
    logger.warning("a stored piece is loaded through Inductor, which takes seconds: %s", why)
    whole = torch_compat.run_source(source, name, store.outside_folder("inductor"))
    call: Callable[[list[Any]], Any] = whole["call"]
    return call


def obstacle(source: str, kernels: Collection[str]) -> str | None:
    """Why a source needs Inductor to run, or None where its own few names and these kernels suffice."""
    wrapper = find_wrapper(ast.parse(source))
    if wrapper is None:
        return "it has no function that calls its kernels"
    missing = _names_used(wrapper) - set(torch_compat.wrapper_names()) - {"extern_kernels", *kernels}
    missing |= {f"extern_kernels.{name}" for name in _externs_used(wrapper) - set(vars(ExternKernels))}
    return f"it uses {', '.join(sorted(missing))}" if missing else None


def _call_of(
    source: str, name: str, kernels: Mapping[str, Any], device: torch.device
) -> Callable[[list[Any]], Any]:
    """The wrapper function alone, with the names it uses, on a device."""
    wrapper = find_wrapper(ast.parse(source))
    assert wrapper is not None
    namespace: dict[str, Any] = {
        **torch_compat.wrapper_names(),
        "extern_kernels": ExternKernels,
        **kernels,
    }
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        _OnDevice(index).visit(wrapper)
    else:
        direct = _Direct()
        direct.visit(wrapper)
        ast.fix_missing_locations(wrapper)
        namespace |= {name: direct_call(op, device) for name, op in direct.ops.items()}
        namespace |= {name: noted(kernel) for name, kernel in kernels.items()}
        namespace["empty_strided_cpu"] = placed(namespace["empty_strided_cpu"])
    exec(compile(ast.Module(body=[wrapper], type_ignores=[]), name, "exec"), namespace)
    if isinstance(wrapper, ast.ClassDef):
        runner = namespace[wrapper.name](partitions=[])
        return runner.call  # type: ignore[no-any-return]
    return namespace["call"]  # type: ignore[no-any-return]


class _OnDevice(ast.NodeTransformer):
    """Generated code names the card it was generated for; it serves any card of the kind."""

    FUNCTIONS = ("_DeviceGuard", "set_device", "get_raw_stream")

    def __init__(self, index: int) -> None:
        self.index = index

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """A call that takes the number of a device, and nothing else, gets the one at hand."""
        self.generic_visit(node)
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in self.FUNCTIONS and len(node.args) == 1:
            node.args = [ast.copy_location(ast.Constant(self.index), node.args[0])]
        return node


class _Direct(ast.NodeTransformer):
    """Where nothing replays launches, torch's dispatcher costs as much as a small kernel at every call.

    So our ops are called directly. What they return is what their fakes promised when the piece was made, and
    is not asserted again; what comes into the piece is.
    """

    OP = re.compile(r"torch\.ops\.lamina\.(\w+)\.default")

    def __init__(self) -> None:
        self.ops: dict[str, str] = {}  # by the name that stands for it

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """The op itself where one is named."""
        found = self.OP.fullmatch(ast.unparse(node))
        if found is None:
            self.generic_visit(node)
            return node
        name = f"lamina_{found[1]}"
        self.ops[name] = found[1]
        return ast.Name(id=name, ctx=ast.Load())

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """No assertion about what an op of ours returned."""
        call = node.value
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "assert_size_stride":
            about = call.args[-1]
            if isinstance(about, ast.Constant) and self.OP.fullmatch(str(about.value)):
                return None
        self.generic_visit(node)
        return node


def find_wrapper(tree: ast.Module) -> ast.ClassDef | ast.FunctionDef | None:
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


def _externs_used(wrapper: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(wrapper)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "extern_kernels"
    }
