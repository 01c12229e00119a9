"""The private names of torch that are used, for torch 2.11 to 2.14; torch_fixes.py alone touches more."""

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _python_dispatch

from ...common.cpu import instruction_set
from ...common.errors import CompileError
from . import torch_fixes
from .torch_fixes import replaced
from .torch_section import FREE, compiling, environment

_Mode: Any = _python_dispatch.TorchDispatchMode


class DispatchMode(_Mode):  # type: ignore[misc]
    """Sees what torch computes in its `with`; without Dynamo, whose import takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def is_size_assertion(target: object) -> bool:
    """Whether an FX target asserts something of a size and computes nothing."""
    return target in (torch.ops.aten._assert_scalar.default, torch._check)


def is_scalar(value: object) -> bool:
    """Whether an FX node's value is a size or a comparison of sizes."""
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymBool, torch.SymFloat))


_overload_name: Any = torch._ops.OpOverload.name  # torch leaves it without types


OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def op_name(target: object) -> str:
    """namespace::name of a torch.library op or packet, "" for anything else."""
    if isinstance(target, torch._ops.OpOverload):
        return str(_overload_name(target)).split(".")[0]
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    return ""


def qualified_name(target: Any) -> str:
    """module.qualname of a function, or namespace::name.overload of an op: the same in every process."""
    if isinstance(target, torch._ops.OpOverload):
        return str(_overload_name(target))
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    return f"{getattr(target, '__module__', None) or ''}.{getattr(target, '__qualname__', target.__name__)}"


def fake_result(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call would return, by running it on the fake tensors of its arguments."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    values, keywords = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
    leaves = torch.utils._pytree.tree_leaves((values, keywords))
    tensors = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
    with tensors[0].fake_mode if tensors else FakeTensorMode():
        return target(*values, **keywords)


def trace_formula(formula: Callable[..., Any], values: list[Any]) -> fx.Graph:
    """The ATen graph of a function on fake tensors, decomposed as Inductor decomposes."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with values[0].fake_mode, torch.no_grad():
        traced = make_fx(formula, decomposition_table=select_decomp_table())(*values)
    return traced.graph


def same_layout(left: object, right: object) -> bool:
    """Whether two fake tensors have one shape, strides and offset; symbols are compared by their text."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return False
    first, second = ((t.shape, t.stride(), t.storage_offset()) for t in (left, right))
    return list(map(str, first)) == list(map(str, second))


def is_random(target: object) -> bool:
    """Whether an op's result differs from call to call."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


# Inductor settings that change the code; they are part of every piece's key.
SETTINGS: dict[str, Any] = {
    "benchmark_harness": False,
    "cpp.threads": 1,  # code for any number of them: our kernels have a pool, little is left beside them
    "deterministic": True,  # no reduction is re-tuned by timing
    "emulate_precision_casts": True,  # rounds to the model's dtype wherever eager does
    "fx_graph_cache": False,  # a hit there would skip our passes; our store replaces it
    "triton.autotune_pointwise": False,  # nor is anything else: a kernel has one form
}


_load_lock = threading.RLock()

# How a kernel that Inductor built learns where a tensor keeps its address.
DATA_POINTER = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"


class AlreadyKnown(Exception):
    """Raised by a rewrite that recognises its graph: no code need be generated."""


def generate(
    module: fx.GraphModule, rewrite: Callable[[fx.Graph], fx.Graph], kernel_folder: Path
) -> str | None:
    """Inductor's source for a piece with its ATen graph rewritten; None where that raised AlreadyKnown."""
    with compiling(), _building_in(kernel_folder), torch_fixes.in_force():
        return _generate(module, rewrite)


def _generate(module: fx.GraphModule, rewrite: Callable[[fx.Graph], fx.Graph]) -> str | None:
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx, config

    found: dict[str, Any] = {}

    def compile_rewritten(inner: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        try:
            inner.graph = rewrite(inner.graph)
        except AlreadyKnown:
            return _never_called
        inner.recompile()
        found["code"] = compile_fx.compile_fx_inner(inner, inputs, **options)
        return found["code"]

    inputs = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
    mode = torch._guards.detect_fake_mode(inputs)
    with (
        torch._guards.tracing(torch._guards.TracingContext(mode)),
        functorch_config.patch(enable_autograd_cache=False),
        config.patch(SETTINGS),
    ):
        compile_fx.compile_fx(module, inputs, inner_compile=compile_rewritten)
    _require_unspecialised(mode)
    if not found:
        return None
    if found["code"].constants:
        raise CompileError(
            f"generated code holds tensors {sorted(found['code'].constants)}; a piece must have none"
        )
    return str(found["code"].source_code)


def begin_triton(device: torch.device) -> Callable[[], object]:
    """Begins what Inductor asks of Triton before its first kernel, and returns what waits for it.

    That is a hash of Triton's files, and C code that is built to ask the driver: a second of other work. What
    fails fails again where Inductor asks.
    """
    from torch.utils import _triton

    if device.type != "cuda":
        return lambda: None

    def ask() -> None:
        with torch.cuda.device(device):
            _triton.triton_hash_with_backend()

    thread = ThreadPoolExecutor(1)
    asked = thread.submit(ask)
    thread.shutdown(wait=False)
    return asked.exception


def inductor_config() -> str:
    """A hash of every setting of Inductor that may change the code, as it is now."""
    from torch._inductor import config

    counts = {name: value for name, value in config.save_config_portable().items() if name not in FREE}
    return hashlib.sha256(repr(sorted(counts.items())).encode()).hexdigest()


def _never_called(*_: Any) -> Any:
    raise AssertionError("the stand-in for a piece that the store already holds was called")


def _require_unspecialised(mode: Any) -> None:
    guards = [str(guard.expr) for guard in mode.shape_env.guards] if mode is not None else []
    if guards:
        raise CompileError(f"code generation specialised the number of tokens: {guards}")


_memos: dict[Path, Any] = {}  # by the folder of the headers


def _memo_of_headers(folder: Path, precompile: Any) -> Any:
    """What precompiles a header and remembers where it lies, in this folder, until that is gone."""
    if folder not in _memos or not folder.is_dir():
        _memos[folder] = functools.cache(getattr(precompile, "__wrapped__", precompile))
    return _memos[folder]


@contextlib.contextmanager
def _building_in(folder: Path) -> Iterator[None]:
    """Has builds leave files here alone and run in threads that end with the block: a worker process would
    break scripts without a main guard."""
    from torch._inductor import async_compile, codecache, cpu_vec_isa

    compiler: Any = async_compile
    headers = folder / "precompiled_headers"
    with (
        _load_lock,
        environment(TORCHINDUCTOR_CACHE_DIR=str(folder), **{DATA_POINTER: _data_pointer()}),
        replaced(
            codecache,
            _HEADER_DIR=str(headers),
            _HEADER_LOCK_DIR=str(headers / "locks"),
            _precompile_header=_memo_of_headers(headers, codecache._precompile_header),
        ),
        ThreadPoolExecutor(compiler.get_compile_threads()) as pool,
        replaced(
            compiler.AsyncCompile,
            use_process_pool=classmethod(lambda cls: False),
            pool=staticmethod(lambda: pool),
        ),
        torch_fixes.builds_are_whole(),
        replaced(compiler.tqdm, monitor_interval=0),  # else a thread watches over bars nobody sees
        replaced(cpu_vec_isa.VecISA, check_build=_has_flags),
    ):
        yield


def _has_flags(isa: Any, code: str) -> bool:
    """Whether the compiler takes the flags of an instruction set that the CPU says it has.

    Inductor would build a library for each and load it in a process of its own: seconds of a first start.
    """
    from torch._inductor import cpp_builder

    return takes_flags(cpp_builder.get_cpp_compiler(), tuple(isa.build_arch_flags().split()))


@functools.cache
def takes_flags(compiler: str, flags: tuple[str, ...]) -> bool:
    """Whether a C++ compiler takes all of these flags, asked with an empty file."""
    command = [compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def _data_pointer() -> str:
    guards: Any = torch._C._dynamo.guards
    return str(guards._torchinductor_pyobject_tensor_data_ptr)


def run_source(source: str, name: str, kernel_folder: Path) -> dict[str, Any]:
    """The namespace of a generated source, run as Inductor would; builds the kernels it does not find."""
    namespace: dict[str, Any] = {"__name__": name}
    with compiling(), _building_in(kernel_folder):
        exec(compile(source, name, "exec"), namespace)
    return namespace


def native_kernels(namespace: dict[str, Any]) -> dict[str, Path]:
    """Each C++ kernel of a generated source by name, with the shared library that holds it."""
    found = {}
    for name, value in namespace.items():
        path = getattr(getattr(value, "__self__", None), "__file__", None)
        if path and path.endswith(".so") and getattr(value, "__name__", "") == "kernel":
            found[name] = Path(path)
    return found


def load_native_kernel(path: Path, name: str) -> Callable[..., None]:
    """The kernel in a shared library that Inductor built, without importing Inductor."""
    with _loading_kernels():
        loader = importlib.machinery.ExtensionFileLoader(f"{name}.kernel", str(path))
        spec = importlib.util.spec_from_loader(loader.name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    kernel: Callable[..., None] = module.kernel
    return kernel


@contextlib.contextmanager
def _loading_kernels() -> Iterator[None]:
    """Sets the variables that a kernel reads while it is loaded; keeps Inductor, which sets them too, out."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    with (
        getattr(dynamo, "compile_lock", _load_lock),
        _load_lock,
        environment(**{DATA_POINTER: _data_pointer()}),
    ):
        yield


def toolchain(device: torch.device) -> dict[str, str]:
    """What code depends on beside its graph: torch, Python and instruction set, or the GPU."""
    stamp = {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": sys.implementation.cache_tag or "",
    }
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        triton = importlib.metadata.version("triton")  # comes with CUDA builds of torch only
        return stamp | {"cuda": str(torch.version.cuda), "sm": f"{major}{minor}", "triton": triton}
    features = hashlib.sha256(instruction_set().encode()).hexdigest()[:16]
    isa = f"{torch.backends.cpu.get_cpu_capability()} {platform.machine()} {features}"
    return stamp | {"isa": isa}


def fake_tensors(
    parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device
) -> dict[str, Tensor]:
    """Tensors with a shape and no memory, to trace a model before its weights are read."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()):
        return {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in parameters.items()
        }


def tensors_of_any_size(inputs: Sequence[tuple[Sequence[int | None], torch.dtype]]) -> list[Tensor]:
    """Fake tensors of these sizes and dtypes; None is a size that all of them share, of any value."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env), shape_env.ignore_fresh_unbacked_symbols():
        any_size: Any = shape_env.create_unbacked_symint()
        shapes = [[any_size if size is None else size for size in sizes] for sizes, _ in inputs]
        return [torch.empty(shape, dtype=dtype) for shape, (_, dtype) in zip(shapes, inputs, strict=True)]


def decompositions(*targets: Any) -> dict[Any, Callable[..., Any]]:
    """The formulas in ATen by which Inductor spells these ops."""
    from torch._inductor.decomposition import select_decomp_table

    table: Mapping[Any, Callable[..., Any]] = select_decomp_table()
    return {target: table[target] for target in targets}


def cpu_has_bfloat16_units() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware (AVX-512 BF16 or AMX)."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, bool)() for probe in probes)


def weak_view(tensor: Tensor) -> Tensor:
    """The same memory under a tensor that does not keep it: valid as long as its graph pool is."""
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.untyped_storage().data_ptr(), tensor.device, tensor.untyped_storage().nbytes()
    )
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def memory_of(tensor: Tensor) -> int:
    """A name of the memory that a tensor, fake ones included, lies in; views of it have the same."""
    return int(tensor.untyped_storage()._cdata)


def num_users(tensor: Tensor) -> int:
    """How many tensors lie in the memory of this one, itself included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1  # less the one made to ask
