"""What benchmarks and examples import is there: they are run by hand, on machines that CI has none of."""

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [path for folder in ("benchmarks", "examples", "docs") for path in (ROOT / folder).rglob("*.py")]


def imported(script: Path) -> Iterator[tuple[str, str]]:
    """Modules of Lamina that a script imports from, each with a name."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lamina":
            yield from ((str(node.module), alias.name) for alias in node.names)


def is_there(module: str, name: str) -> bool:
    """Whether the module has the name, as one of its own or as a module within."""
    try:
        return hasattr(importlib.import_module(module), name) or bool(
            importlib.util.find_spec(f"{module}.{name}")
        )
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(ROOT)))
def test_whatever_a_script_imports_of_lamina_is_there(script: Path) -> None:
    assert [each for each in imported(script) if not is_there(*each)] == []
