"""A stored source made callable: by its own few names where they suffice, else as Inductor would run it."""

import ast
import logging
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ...common.errors import KernelLaunchError
from ...common.logging import get_logger, log_once
from ...common.store import Store
from ...custom_ops._shared.call_capture import capturable, statically_allocated, uncapturable
from ...custom_ops._shared.library import direct_call
from ..torch_internals import torch_compat
from . import torch_wrapper, wrapper_form
from .launch import Launcher, read_kernel
from .wrapper_form import find_wrapper

logger = get_logger("compiler")
Call = Callable[[list[Any]], Any]


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
) -> Call:
    """The `call` of a stored source, its kernels taken from the store.

    Importing Inductor takes seconds that a warm start does not have: only the wrapper function is taken from
    the source, and given the names it uses. A source of another form is run whole.
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
        except (KernelLaunchError, ImportError) as error:
            why = str(error)
    return call_of_whole(torch_compat.run_source(source, name, store.build_folder()), why)


def call_of_whole(namespace: Mapping[str, Any], why: str) -> Call:
    """The `call` of a source that Inductor has run, which is logged; its calls cannot be captured."""
    message = f"a piece is run by Inductor's own wrapper, whose import takes seconds at each start: {why}"
    log_once(logger, logging.WARNING, message)
    return uncapturable(namespace["call"], "Inductor's own wrapper does not add its calls")


def obstacle(source: str, kernels: Collection[str]) -> str | None:
    """Why a source needs Inductor to run, or None where its own few names and these kernels suffice."""
    return wrapper_form.obstacle(ast.parse(source), kernels, vars(ExternKernels))


def _call_of(source: str, name: str, kernels: Mapping[str, Any], device: torch.device) -> Call:
    """The wrapper function alone, with the names it uses, on a device."""
    tree = ast.parse(source)
    wrapper = find_wrapper(tree)
    assert wrapper is not None
    values = {**torch_wrapper.wrapper_values(), torch_wrapper.EXTERN_KERNELS: ExternKernels}
    if device.type != "cuda":
        allocate = f"{torch_wrapper.GUARDS}._empty_strided_cpu"
        values[allocate] = statically_allocated(values[allocate])
        kernels = {name: capturable(kernel) for name, kernel in kernels.items()}
    bound = wrapper_form.meanings(tree)
    namespace: dict[str, Any] = {name: values[full] for name, full in bound.items() if full in values}
    namespace |= kernels
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        _OnDevice(index).visit(wrapper)
    else:
        direct = _Direct()
        direct.visit(wrapper)
        ast.fix_missing_locations(wrapper)
        namespace |= {name: direct_call(op, device) for name, op in direct.ops.items()}
    exec(compile(ast.Module(body=[wrapper], type_ignores=[]), name, "exec"), namespace)
    if isinstance(wrapper, ast.ClassDef):
        runner = namespace[wrapper.name](partitions=[])
        return runner.call  # type: ignore[no-any-return]
    return namespace["call"]  # type: ignore[no-any-return]


class _OnDevice(ast.NodeTransformer):
    """Rewrites device numbers: generated code names the GPU it was made on, and serves any of its kind."""

    FUNCTIONS = ("_DeviceGuard", "set_device", "get_raw_stream")

    def __init__(self, index: int) -> None:
        self.index = index

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """A call whose only argument is a device number gets that of the current device."""
        self.generic_visit(node)
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in self.FUNCTIONS and len(node.args) == 1:
            node.args = [ast.copy_location(ast.Constant(self.index), node.args[0])]
        return node


class _Direct(ast.NodeTransformer):
    """Calls our ops without torch's dispatcher, which costs as much as a small kernel without CUDA graphs.

    What they return is what their fakes promised when the piece was made, and is not asserted again; what
    comes into the piece is.
    """

    ASSERTIONS = ("assert_size_stride", "assert_tensor_metadata")
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
        if isinstance(call, ast.Call) and ast.unparse(call.func) in self.ASSERTIONS:
            about = call.args[-1]
            if isinstance(about, ast.Constant) and self.OP.fullmatch(str(about.value)):
                return None
        self.generic_visit(node)
        return node
