"""Imports go one way; the contract itself stands in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_imports_go_one_way():
    linter = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run([linter, "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 kept, 0 broken" in result.stdout
