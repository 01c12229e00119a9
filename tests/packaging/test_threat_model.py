"""Every promise of docs/threat_model.md is held by a test that is there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "threat_model.md"
NAMED = re.compile(r"([\w/]+\.py)::(test_\w+)")


def promises():
    """The tests that each row names."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")][2:]
    return {row: NAMED.findall(row.split("|")[3]) for row in rows}


def test_every_promise_names_a_test_that_is_there():
    assert len(promises()) > 15
    for row, named in promises().items():
        assert named, row
        for file, test in named:
            tree = ast.parse((ROOT / "tests" / file).read_text())
            assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, test
