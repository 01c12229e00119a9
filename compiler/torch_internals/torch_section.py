"""The one place of a process where torch traces and generates code for us; it is left as it was found."""

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import overrides
from torch.utils import _config_module

from .torch_fixes import replaced

_UNSET: Any = _config_module._UNSET_SENTINEL
P = ParamSpec("P")
R = TypeVar("R")

# Variables by which a user steers torch's compilers; none of them counts for code of ours.
STEERING = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_", "TORCH_DYNAMO_", "AOT_")
STEERED = (
    "torch._dynamo.config",
    "torch._inductor.config",
    "torch._functorch.config",
    "torch.compiler.config",
    "torch.fx.experimental._config",
)
# What a user may choose there: how code is built, not what it computes.
FREE = frozenset({"compile_threads", "cpp.cxx", "cpp.vec_isa_ok", "worker_start_method"})
AUTOCAST_DEVICES = ("cpu", "cuda")
ERRSTATE = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}  # NumPy's own

# What a caller may have set around a call, and what becomes of it; docs/warm_start.md has it as a table.
NEUTRALIZED = (
    "autocast",
    "default dtype",
    "default device and other function modes",
    "deterministic algorithms",
    "np.errstate",
    "grad mode and inference mode",
    "variables of torch's compilers: TORCHINDUCTOR_…, TORCHDYNAMO_…, TORCH_COMPILE_…",
    "torch.compiler.set_stance",
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the warnings of torch about its own names and defaults while it imports and compiles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(slots=True)
class _ProcessWide:
    """A setting that all threads share: set by the first that needs it otherwise, set back by the last."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    wanted: Any
    num_inside: int = 0
    before: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self) -> bool:
        """Whether leave() is due: the setting had to be changed, or another thread has it changed."""
        if self.num_inside == 0 and self.read() == self.wanted:
            return False
        with self.lock:
            if self.num_inside == 0:
                self.before = self.read()
                self.write(self.wanted)
            self.num_inside += 1
        return True

    def leave(self) -> None:
        """Undo one enter() that returned True."""
        with self.lock:
            self.num_inside -= 1
            if self.num_inside == 0:
                self.write(self.before)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(state: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


_DTYPE = _ProcessWide(read=torch.get_default_dtype, write=torch.set_default_dtype, wanted=torch.float32)
_DETERMINISM = _ProcessWide(read=_deterministic, write=_set_deterministic, wanted=(False, False))


def neutral() -> contextlib.AbstractContextManager[None]:
    """Within it torch and numpy compute by their defaults, whatever a caller set: default dtype, determinism,
    autocast, modes, error state. All of it is as before afterwards.

    To be entered at once: what has to be reset is looked up when this is called.
    """
    return _NOTHING_TO_DO if _is_neutral() else _neutralized()


_NOTHING_TO_DO = contextlib.nullcontext()


def _is_neutral() -> bool:
    """Whether neither this thread nor a process-wide setting needs resetting; cheap, as each step asks."""
    return (
        torch.get_default_dtype() is torch.float32
        and not torch._C._len_torch_function_stack()
        and not torch._C._is_any_autocast_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and not (_DTYPE.num_inside or _DETERMINISM.num_inside)
        and np.geterr() == ERRSTATE
    )


@contextlib.contextmanager
def _neutralized() -> Iterator[None]:
    undo: list[Callable[[], object]] = []
    modes: Any = overrides
    try:
        for setting in (_DTYPE, _DETERMINISM):
            if setting.enter():
                undo.append(setting.leave)
        for device in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                torch.set_autocast_enabled(device, False)
                undo.append(functools.partial(torch.set_autocast_enabled, device, True))
        while torch._C._len_torch_function_stack():
            undo.append(functools.partial(modes._push_mode, modes._pop_mode()))
        if np.geterr() != ERRSTATE:
            undo.append(functools.partial(np.seterr, **np.seterr(**ERRSTATE)))  # type: ignore[arg-type]
        yield
    finally:
        while undo:
            undo.pop()()


def outside_dynamo(kind: type[R]) -> type[R]:
    """A class whose methods run as they are written, also where a caller's torch.compile meets one."""
    for name, method in list(vars(kind).items()):
        if isinstance(method, FunctionType) and (name == "__init__" or not name.startswith("__")):
            setattr(kind, name, as_written(method))
    return kind


def as_written(function: Callable[P, R]) -> Callable[P, R]:
    """The function out of the reach of a caller's torch.compile; imports no Dynamo."""
    eval_frame: Any = torch._C._dynamo.eval_frame

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        before = eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(before)

    marks: Any = call
    marks._torchdynamo_disable = True
    marks._torchdynamo_disable_msg = "Lamina compiles its models itself; call it outside a compiled function"
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    eval_frame.set_code_exec_strategy(marks.__code__, skip)
    return call


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """One thread at a time, those in a user's torch.compile included, with torch as it is shipped.

    Whatever a user has set or kept in Dynamo's caches is there again afterwards, and nothing of ours.
    """
    convert_frame = _imported("torch._dynamo.convert_frame")
    _imported("torch._inductor.compile_fx")
    modes: Any = torch.utils._python_dispatch
    with (
        convert_frame.compile_lock,
        quiet(),
        neutral(),
        modes._disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        _without_steering(),
        _as_shipped(),
        _no_bisection(),
        torch.compiler.set_stance("default"),
        _caches_kept(),
        _others_may_call(),
    ):
        yield


def import_dynamo() -> None:
    """For who runs ops on meta tensors, some of which import it otherwise, and leave a folder in TMPDIR."""
    _imported("torch._dynamo")


_import_lock = threading.Lock()


def _imported(name: str) -> Any:
    """A module of torch, whose import warns; one thread at a time, since what silences that is shared."""
    if name not in sys.modules:
        # Dynamo makes its cache's folder when it is imported, and sets the variable: here is one.
        with _import_lock, quiet(), neutral(), environment(TORCHINDUCTOR_CACHE_DIR=tempfile.gettempdir()):
            importlib.import_module(name)
    return importlib.import_module(name)  # which waits where another thread is in the middle of it


@contextlib.contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Variables for a while, None for those that shall be missing; each is as it was at the end."""
    before = {name: os.environ.get(name) for name in values}
    try:
        _set_variables(values)
        yield
    finally:
        _set_variables(before)


def _set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is not None:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _without_steering() -> Iterator[None]:
    """Unsets the variables that steer torch's compilers; afterwards they are as before."""
    before = {name: os.environ[name] for name in os.environ if name.startswith(STEERING)}
    try:
        _set_variables(dict.fromkeys(before))
        yield
    finally:
        now = [name for name in os.environ if name.startswith(STEERING)]
        _set_variables(dict.fromkeys(now) | before)


@contextlib.contextmanager
def _as_shipped() -> Iterator[None]:
    """Sets torch's compilers to the defaults of their sources, whatever a user or variables changed."""
    with contextlib.ExitStack() as stack:
        for name in STEERED:
            module = _imported(name)
            shipped = _shipped(name)
            for entry in module._config.values():
                if entry.env_value_force is not _UNSET:
                    stack.enter_context(replaced(entry, env_value_force=_UNSET))
            changed = {
                key: value for key, value in shipped.items() if not _is_same(getattr(module, key), value)
            }
            stack.enter_context(module.patch(changed))
        yield


@contextlib.contextmanager
def _no_bisection() -> Iterator[None]:
    """Keeps torch's compiler bisector, which looks into a folder of the user, out of our compilations."""
    bisector: Any = _imported("torch._inductor.compiler_bisector").CompilerBisector
    with replaced(bisector, get_backend=classmethod(lambda cls: None)):
        yield


def _is_same(value: object, other: object) -> bool:
    return type(value) is type(other) and (value is other or value == other)


@functools.cache
def _shipped(name: str) -> dict[str, Any]:
    """The settings of a config module as its source has them where no variable is set."""
    file = sys.modules[name].__file__
    alias = f"_lamina_{name.replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(alias, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    logging.getLogger(alias).disabled = True  # it would log a second time what it found of the machine
    sys.modules[alias] = module
    try:
        with _without_steering():
            spec.loader.exec_module(module)
    finally:
        del sys.modules[alias]
    return {
        key: entry.default
        for key, entry in _entries(module).items()
        if entry.alias is None and key in _entries(sys.modules[name]) and key not in FREE
    }


def _entries(module: ModuleType) -> dict[str, Any]:
    entries: dict[str, Any] = module._config
    return entries


@contextlib.contextmanager
def _others_may_call() -> Iterator[None]:
    """Lets compiled functions of other threads run uncompiled while we trace, in place of raising.

    Torch has one flag a process for "FX traces now". The setting is forced: else it is of one thread.
    """
    entry = _entries(_imported("torch._dynamo.config")).get("error_on_nested_fx_trace")
    with contextlib.nullcontext() if entry is None else replaced(entry, env_value_force=False):
        yield


@contextlib.contextmanager
def _caches_kept() -> Iterator[None]:
    """Restores Dynamo's caches and counters: they hold what users compile, and nothing of ours."""
    counters: Any = _imported("torch._dynamo.utils").counters
    before = {name: counter.copy() for name, counter in counters.items()}
    known = [(cache, set(cache)) for cache in _caches()]
    try:
        yield
    finally:
        counters.clear()
        counters.update(before)
        for cache, names in known:
            for name in set(cache) - names:
                del cache[name]


def _caches() -> list[dict[Any, Any]]:
    eval_frame, pgo = _imported("torch._dynamo.eval_frame"), _imported("torch._dynamo.pgo")
    return [eval_frame.cached_backends, pgo.get_code_state()]
