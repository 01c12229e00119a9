"""What mutants are built into and which tests run them: each op's C++ kernel, and CUDA kernels on a host."""

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lamina.custom_ops._shared import build, cpu_kernel
from lamina.custom_ops._shared.build import CSRC

from ..custom_ops import host_kernels

TESTS = Path(__file__).resolve().parent.parent / "custom_ops"
ON_HOST = {  # the tests of test_kernels_on_a_host.py that run a kernel
    "adjust_logits": "adjusted or chunks or word",
    "keep_typical": "typical",
    "sample": "token or chunks or share or sample_on_a_host",
    "top_logprobs": "likeliest",
}
NOT_OF_KERNELS = "not opcheck and not formula_is and not formula_and and not arguments_that"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A library and its tests."""

    name: str
    on_host: bool
    tests: tuple[str, ...]  # what pytest is given

    def command(self, csrc: Path, folder: Path) -> list[str]:
        """What compiles it from these sources, but for where to."""
        if self.on_host:
            return host_kernels.compile_command(self.name, folder, csrc)
        flags = ["-O1" if flag == "-O3" else flag for flag in build._flags()]  # in half the time
        if not _has_amx():
            flags.append("-mno-amx-bf16")  # no mutants of what nothing here can run
        return [
            *build.find_compiler(),
            *flags,
            "-w",
            f"-I{csrc / 'include'}",
            str(csrc / self.name / "cpu.cpp"),
        ]

    def use(self, library: Path) -> None:
        """Let the tests that run in this process load a library in place of the one they would build."""

        def build_on_host(
            name: str, folder: Path, otherwise: Callable[..., Path] = host_kernels.build
        ) -> Path:
            return library if name == self.name else otherwise(name, folder)

        def load_kernel(op: str, otherwise: Callable[..., ctypes.CDLL] = build.load_kernel) -> ctypes.CDLL:
            return ctypes.CDLL(str(library)) if op == self.name else otherwise(op)

        if self.on_host:
            host_kernels.build = build_on_host
        else:
            cpu_kernel.load_kernel = load_kernel  # type: ignore[attr-defined]

    def lines(self) -> dict[str, set[int]]:
        """The lines of each source, by its place in csrc, that the compiler of this machine sees."""
        with tempfile.TemporaryDirectory() as name:
            command = [*self.command(CSRC, Path(name)), "-E"]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            return _lines_in(text, Path(name))


def targets() -> tuple[Target, ...]:
    """Every library that this machine can build and run, those with the quickest tests first."""
    found = []
    for source in sorted(CSRC.glob("*/cpu.cpp")):
        op = source.parent.name
        found.append(Target(name=op, on_host=False, tests=(f"{TESTS}/test_{op}.py", "-k", NOT_OF_KERNELS)))
    for name, words in ON_HOST.items():
        own = TESTS / f"test_{name}_on_a_host.py"
        files = f"{TESTS}/test_kernels_on_a_host.py", *([str(own)] if own.exists() else [])
        found.append(Target(name=name, on_host=True, tests=(*files, "-k", words)))
    persistent = f"{TESTS}/test_persistent_gemm_on_a_host.py"
    return (*found, Target(name="persistent_gemm", on_host=True, tests=(persistent,)))


def _has_amx() -> bool:
    return bool(build.load_kernel("linear").linear_has_amx())


def _lines_in(preprocessed: str, copies: Path) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    file, number = None, 0
    for text in preprocessed.splitlines():
        if marker := re.match(r'# (\d+) "([^"]*)"', text):
            number, path = int(marker[1]), Path(os.path.abspath(marker[2]))
            file = str(path.relative_to(CSRC)) if path.is_relative_to(CSRC) else None
            if path.parent == copies.resolve() and (CSRC / "include" / path.name).exists():
                file = f"include/{path.name}" if path.stat().st_size > 100 else None
            continue
        if file is not None and text.strip():
            found.setdefault(file, set()).add(number)
        number += 1
    return found


def lay_out(csrc: Path, changed: str, text: str) -> None:
    """A folder of sources of which one says something else."""
    for source in CSRC.rglob("*"):
        place = csrc / source.relative_to(CSRC)
        if source.is_dir():
            place.mkdir(parents=True)
        elif str(source.relative_to(CSRC)) != changed:
            place.symlink_to(source)
    (csrc / changed).write_text(text)


def compiled(target: Target, csrc: Path, folder: Path) -> Path | None:
    """The library of a target from these sources in an empty folder; None where they are no C++."""
    headers = folder / "headers"
    headers.mkdir()
    library = folder / f"{target.name}.so"
    command = [*target.command(csrc, headers), "-o", str(library)]
    result = subprocess.run(command, capture_output=True)
    shutil.rmtree(headers)
    return None if result.returncode else library
