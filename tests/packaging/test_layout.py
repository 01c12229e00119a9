"""The house stands as designed: links, lengths, who may name what."""

import ast
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "src" / "lamina"
PACKAGES = ("cli", "common", "compiler", "custom_ops", "models", "runtime", "serving", "testing")
SOURCES = sorted(path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))
ALL_PYTHON = sorted(
    path
    for folder in (*PACKAGES, "benchmarks", "examples", "tests", "src")
    for path in (ROOT / folder).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_package_holds_a_link_per_folder_and_public_names():
    links = {path.name: os.readlink(path) for path in PACKAGE.iterdir() if path.is_symlink()}
    assert links == {name: f"../../{name}" for name in (*PACKAGES, "csrc")}
    assert all((PACKAGE / name).is_dir() for name in links)
    files = {path.name for path in PACKAGE.iterdir() if not path.is_symlink()} - {"__pycache__"}
    assert files == {"__init__.py", "__main__.py", "vllm.py", "py.typed"}


def test_every_folder_of_python_is_a_package():
    folders = {path.parent for path in SOURCES}
    assert not [name_of(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_no_file_is_over_400_lines():
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in ALL_PYTHON}
    assert not {name: length for name, length in lengths.items() if length > 400}


def test_every_file_says_first_what_it_is_for():
    assert not [name_of(path) for path in ALL_PYTHON if not ast.get_docstring(ast.parse(path.read_text()))]


def test_no_function_is_over_60_lines():
    offenders = {
        f"{name_of(path)}:{function.lineno} {function.name}": length(function)
        for path in ALL_PYTHON
        for function in functions(path)
        if length(function) > 60
    }
    assert not offenders


def test_median_function_is_under_10_lines():
    lengths = [length(function) for path in SOURCES for function in functions(path)]
    assert statistics.median(lengths) < 10


PRIVATE = {
    f"compiler/torch_internals/torch_{name}.py" for name in ("compat", "fixes", "section", "trace")
} | {"compiler/codegen/torch_wrapper.py"}


def test_private_torch_names_are_in_their_files_alone():
    private = re.compile(r"\btorch(?!\.ops\b)(\.\w+)*\._[a-z]|from torch(\.\w+)* import .*\b_[a-zA-Z]")
    offenders = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in SOURCES
        if name_of(path) not in PRIVATE
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if private.search(line)
    ]
    assert not offenders


def test_environment_variables_are_read_in_env_alone():
    uses = re.compile(r"os\.(environ|getenv)|from os import .*\b(environ|getenv)\b")
    # torch has switches that are environment variables only; torch_section sets them and puts them back
    allowed = {"common/env.py", "compiler/torch_internals/torch_section.py"}
    assert not {name_of(path) for path in SOURCES if uses.search(path.read_text())} - allowed


def test_only_the_kernel_builder_knows_csrc():
    quoted = re.compile(r"""["'/]csrc\b""")
    assert [name_of(path) for path in SOURCES if quoted.search(path.read_text())] in (
        [],
        ["custom_ops/_shared/build.py"],
    )


def test_library_imports_its_own_parts_relatively():
    absolute = re.compile(rf"^\s*(from|import) (lamina|{'|'.join(PACKAGES)})\b", re.MULTILINE)
    assert not [name_of(path) for path in SOURCES if absolute.search(path.read_text())]


def test_no_module_leans_on_the_folder_names_at_the_root():
    """A second copy of a module, imported as `runtime` and not `lamina.runtime`, registers its ops twice."""
    code = f"import lamina, sys; assert not set({PACKAGES!r}) & set(sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}
    )


def test_public_names_are_exactly_those_listed():
    import lamina

    assert len(set(lamina.__all__)) == len(lamina.__all__)
    assert all(getattr(lamina, name) is not None for name in lamina.__all__)
    assert set(lamina.__all__) <= set(dir(lamina))
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        lamina.no_such_name  # noqa: B018 (the access is the test)
