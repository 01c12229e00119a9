"""Kernels are compiled once, safely, and say what is wrong when they do not compile."""

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lamina.common.collection import collect
from lamina.common.errors import KernelBuildError
from lamina.common.store import PLAIN, Store
from lamina.custom_ops._shared import build
from lamina.custom_ops._shared.build import build_kernel, find_built, load_library
from lamina.custom_ops._shared.ledger import Ledger, watched

SOURCE = '#include "shared.h"\nextern "C" int answer() { return ANSWER; }\n'
BUILD = """
import logging, os, sys, traceback
from pathlib import Path
logging.basicConfig(level=logging.INFO)
from lamina.common.store import Store
from lamina.custom_ops._shared.build import build_kernel
children = []
for _ in range(4):
    children.append(os.fork())
    if not children[-1]:
        try:
            build_kernel("op", Path(sys.argv[1]), Store(sys.argv[2]))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
"""


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A csrc/ with one small op, which no runtime of this process knows."""
    monkeypatch.setattr(build, "LEDGER", Ledger())
    folder = tmp_path / "csrc"
    (folder / "op").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "op" / "cpu.cpp").write_text(SOURCE)
    (folder / "include" / "shared.h").write_text("#define ANSWER 42\n")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store")


def answer(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


def test_a_kernel_is_built_once_and_found_again(
    csrc: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build_kernel("op", csrc, store)
    assert answer(built) == 42
    monkeypatch.setattr("lamina.custom_ops._shared.build._build", lambda *args: pytest.fail("built twice"))
    assert build_kernel("op", csrc, store) == built


def test_a_built_kernel_is_used_where_there_is_no_compiler(
    csrc: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build_kernel("op", csrc, store)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setenv("PATH", "/nowhere")
    assert build_kernel("op", csrc, store) == built


def test_whoever_watches_is_asked_before_a_kernel_is_built(csrc: Path, store: Store) -> None:
    def refuse(what: str) -> None:
        raise KernelBuildError(f"nobody may build {what}")

    with watched(refuse), pytest.raises(KernelBuildError, match="nobody may build the kernel of op"):
        build_kernel("op", csrc, store)
    built = build_kernel("op", csrc, store)
    with watched(refuse):
        assert build_kernel("op", csrc, store) == built


def test_what_a_process_has_loaded_is_copied_to_the_store_it_turns_to(csrc: Path, tmp_path: Path) -> None:
    ledger, first, second = Ledger(), Store(tmp_path / "first"), Store(tmp_path / "second")
    ledger.keep_in(first)
    build_kernel("op", csrc, first)
    (key,) = first.refs("kernels")
    ledger.note("kernels", key, "op")
    ledger.keep_in(second)
    assert ledger.store is second
    found = find_built(second, key)
    assert found is not None
    assert answer(found) == 42


ODD = ["a b", "it's", 'say "x"', "back\\slash", "two\nlines", "$HOME;`id`", "#é東", "@file"]


@pytest.mark.parametrize("name", ODD)
def test_a_kernel_is_built_whatever_the_path_of_the_cache_is(csrc: Path, tmp_path: Path, name: str) -> None:
    store = Store(tmp_path / name)
    path = build_kernel("op", csrc, store)
    assert answer(path) == 42
    assert store.root in path.parents
    assert PLAIN.fullmatch(str(store.build_folder()))


def test_a_library_that_is_collected_as_soon_as_it_is_built_is_built_again_and_loaded(
    csrc: Path, store: Store
) -> None:
    paths = []

    def build() -> Path:
        paths.append(build_kernel("op", csrc, store))
        if len(paths) < 3:
            collect(store, 0)
        return paths[-1]

    assert load_library("op", store, build).answer() == 42
    assert len(paths) == 3


def test_the_record_of_another_kernel_is_not_loaded(
    csrc: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    build_kernel("op", csrc, store)
    (key,) = store.refs("kernels")
    (csrc / "include" / "shared.h").write_text("#define ANSWER 43\n")
    build_kernel("op", csrc, store)
    (other,) = {*store.refs("kernels")} - {key}
    store.write_ref("kernels", other, store.read_ref("kernels", key))
    assert find_built(store, other) is None
    assert "is of another one; it is built again" in caplog.text
    assert answer(build_kernel("op", csrc, store)) == 43


def test_a_changed_header_is_another_kernel(csrc: Path, store: Store) -> None:
    build_kernel("op", csrc, store)
    (csrc / "include" / "shared.h").write_text("#define ANSWER 43\n")
    assert answer(build_kernel("op", csrc, store)) == 43


def test_a_damaged_library_is_built_again(csrc: Path, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    path = build_kernel("op", csrc, store)
    path.write_bytes(path.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        assert answer(build_kernel("op", csrc, store)) == 42
    damaged = {id(record) for record in caplog.records if "damaged" in record.getMessage()}
    assert len(damaged) == 1


def test_four_processes_at_once_compile_once(csrc: Path, store: Store) -> None:
    command = [sys.executable, "-c", BUILD, str(csrc), str(store.root)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "LAMINA_LOG_LEVEL": "INFO"}
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("compiling the kernel of op") == 1, done.stderr
    assert answer(build_kernel("op", csrc, store)) == 42
    assert not list((store.root / "temporary").iterdir())


def test_a_compile_error_shows_the_first_error_line(csrc: Path, store: Store) -> None:
    (csrc / "op" / "cpu.cpp").write_text(
        "int f() { return undeclared_name; }\nint g() { return other_name; }\n"
    )
    with pytest.raises(KernelBuildError) as raised:
        build_kernel("op", csrc, store)
    assert "cpu.cpp:1:" in str(raised.value)
    assert "undeclared_name" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("variable,value", [("CXX", "/nowhere/c++"), ("PATH", "/nowhere")])
def test_no_compiler_is_said_with_the_remedy(
    csrc: Path, store: Store, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(KernelBuildError, match="install g\\+\\+ or set CXX"):
        build_kernel("op", csrc, store)


def test_without_a_compiler_auto_runs_the_formula_and_an_explicit_kernel_raises(tmp_path: Path) -> None:
    program = """
import torch
from lamina.common.errors import KernelBuildError
from lamina.custom_ops import paged_attention
from lamina.custom_ops._shared.registry import select
i = lambda *values: torch.tensor(values, dtype=torch.int32)
q, cache = torch.ones(2, 2, 4), torch.ones(2, 4, 2, 4)
out = torch.zeros_like(q)
for _ in range(3):
    paged_attention(out, q, cache, cache, i(1)[None], i(2), i(0, 2), 2, 0.5, -1, -1, 0.0)
assert torch.equal(out, q)
try:
    select("paged_attention", device=torch.device("cpu"), dtype=torch.float32, provider="cpu")
except KernelBuildError as error:
    print(error)
"""
    environment = os.environ | {"CXX": "/nowhere/c++", "LAMINA_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert "CXX is '/nowhere/c++'" in result.stdout
    said = [line for line in result.stderr.splitlines() if "paged_attention" in line]
    assert len(said) == 1
    assert "reference (no C++ compiler" in said[0]


def test_a_compilers_own_files_lie_in_the_store(
    csrc: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, seen = tmp_path / "compiler", tmp_path / "seen"
    compiler.write_text(f'#!/bin/sh\necho "$TMPDIR" >> {seen}\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert answer(build_kernel("op", csrc, store)) == 42
    assert Path(seen.read_text().splitlines()[0]).parent == store.root / "temporary"
