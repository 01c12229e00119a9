"""Native kernels: csrc/<op>/cpu.cpp compiled once by the machine's C++ compiler, kept in the store."""

import ctypes
import functools
import hashlib
import json
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from ...common import env
from ...common.cpu import instruction_set
from ...common.errors import KernelBuildError, StoreError
from ...common.logging import get_logger
from ...common.store import Store
from .ledger import KERNELS, LEDGER, before_build

logger = get_logger("custom_ops")

CSRC = Path(__file__).resolve().parent.parent.parent / "csrc"
COMPILERS = ("c++", "g++", "clang++")
THREAD_POOL = "thread_pool"  # what every kernel's work is spread by
ATTEMPTS = 5  # to load what a collection may remove as soon as it is built


def load_kernel(op: str) -> ctypes.CDLL:
    """The shared library of csrc/<op>/cpu.cpp, built on first use on this machine."""
    load_thread_pool()
    return load_library(op, LEDGER.store, lambda: build_kernel(op, CSRC, LEDGER.store))


@functools.cache
def load_thread_pool() -> ctypes.CDLL:
    """The library of csrc/thread_pool: one a process, whose symbols those that are loaded later find."""
    store = LEDGER.store
    return load_library(
        THREAD_POOL, store, lambda: build_kernel(THREAD_POOL, CSRC, store), mode=ctypes.RTLD_GLOBAL
    )


def load_library(
    op: str, store: Store, build: Callable[[], Path], mode: int = ctypes.RTLD_LOCAL
) -> ctypes.CDLL:
    """The library that `build` finds or makes, opened while no collection can remove it."""
    for _ in range(ATTEMPTS):
        path = build()
        with store.using():
            if path.exists():
                try:
                    return ctypes.CDLL(str(path), mode=mode)
                except OSError as error:
                    raise KernelBuildError(
                        f"the kernel of {op} was built but cannot be loaded: {error}"
                    ) from error
    raise KernelBuildError(
        f"the kernel of {op} was removed from {store.root} {ATTEMPTS} times before it could be loaded; "
        "what collects there should leave more"
    )


def is_built(op: str) -> bool:
    """Whether the kernel of an op need not be built any more."""
    return find_built(LEDGER.store, _key(op, CSRC)) is not None


def prepare_kernel(op: str) -> None:
    """Have the kernel of an op built, without asking whoever watches and without counting it as used."""
    key, store = _key(op, CSRC), LEDGER.store
    if find_built(store, key) is None:
        _build_once(key, store, lambda key: _build(op, CSRC, store, key))


def build_kernel(op: str, csrc: Path, store: Store) -> Path:
    """Where the built library lies; many processes at once compile it only once."""
    return find_or_build(op, _key(op, csrc), store, lambda key: _build(op, csrc, store, key))


def find_or_build(op: str, key: str, store: Store, build: Callable[[str], Path]) -> Path:
    """The library kept under a key, built now if there is none; other processes wait for it."""
    built = find_built(store, key)
    if built is None:
        before_build(f"the kernel of {op}")
        built = _build_once(key, store, build)
    LEDGER.note(KERNELS, key, op)
    return built


def _build_once(key: str, store: Store, build: Callable[[str], Path]) -> Path:
    with store.lock(f"{KERNELS}-{key}"):
        return find_built(store, key) or build(key)


def read_sources(op: str, csrc: Path, suffixes: tuple[str, ...]) -> list[list[str]]:
    """Name and text of every source with one of the suffixes that the kernel of an op may include."""
    paths = sorted([*(csrc / op).iterdir(), *(csrc / "include").iterdir()])
    return [[path.name, path.read_text()] for path in paths if path.suffix in suffixes]


def hash_factors(*factors: object) -> str:
    """The key of everything that a binary depends on."""
    return hashlib.sha256(json.dumps(factors).encode()).hexdigest()


def keep(store: Store, key: str, target: Path, **facts: str) -> Path:
    """Put a built library into the store under its key."""
    with store.using():
        digest = store.put(target.read_bytes())
        store.write_ref(KERNELS, key, {"key": key, "object": digest, **facts})
        return store.path(digest)


def find_compiler() -> list[str]:
    """The command of CXX, or of the first compiler on PATH."""
    chosen = env.cxx_compiler()
    commands = [shlex.split(chosen)] if chosen else [[name] for name in COMPILERS]
    for command in commands:
        if command and shutil.which(command[0]):
            return command
    wanted = (
        f"CXX is {chosen!r}, which is not there" if chosen else f"none of {', '.join(COMPILERS)} is on PATH"
    )
    raise KernelBuildError(f"no C++ compiler: {wanted}; install g++ or set CXX")


def _flags() -> list[str]:
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    linked = ["-undefined", "dynamic_lookup"] if platform.system() == "Darwin" else []  # the thread pool
    return ["-std=c++17", "-O3", native, "-pthread", "-fPIC", "-shared", *linked]


def _key(op: str, csrc: Path) -> str:
    """What makes a binary the right one: sources, flags and instruction set; no path and no host.

    Nor the compiler, which need not be there where the kernel is used; the record of the kernel names it.
    """
    texts = read_sources(op, csrc, (".cpp", ".h"))
    machine = platform.system(), platform.machine(), instruction_set()
    return hash_factors(op, texts, _flags(), machine)


def find_built(store: Store, key: str) -> Path | None:
    """Where the library of a key lies, checked now, or None."""
    ref = store.read_ref(KERNELS, key)
    if ref is None:
        return None
    try:
        if ref["key"] == key:
            return store.path(ref["object"])
        logger.warning("the record of kernel %s in the cache is of another one; it is built again", key[:16])
    except StoreError:  # logged by the store
        pass
    except (TypeError, KeyError) as error:
        logger.warning("the record of kernel %s in the cache cannot be read: %r", key[:16], error)
    return None


def _build(op: str, csrc: Path, store: Store, key: str) -> Path:
    compiler = find_compiler()
    logger.info("compiling the kernel of %s with %s, once on this machine", op, compiler[0])
    with store.temporary_folder(for_compiler=True) as folder:
        target = folder / f"{op}.so"
        command = [
            *compiler,
            *_flags(),
            f"-I{csrc / 'include'}",
            str(csrc / op / "cpu.cpp"),
            "-o",
            str(target),
        ]
        result = run_tool(command, folder)
        if result.returncode:
            raise KernelBuildError(f"the kernel of {op} did not compile: {first_error(result.stderr)}")
        version = run_tool([*compiler, "--version"]).stdout.partition("\n")[0]
        return keep(store, key, target, op=op, compiler=version)


def run_tool(command: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The finished process of a compiler, with its output as text.

    folder: for the compiler's own files, which stay where it is ended by force.
    """
    environment = None if folder is None else env.with_temporary_files_in(folder)
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise KernelBuildError(f"the compiler {command[0]} cannot be run: {error}") from error


def first_error(output: str) -> str:
    """The first line of a compiler's output that is an error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line), lines[-1] if lines else "no message")
