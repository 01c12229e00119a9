"""Schemathesis makes requests out of openapi.json: no 5xx, and no answer but those documented."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance")


@pytest.mark.skipif(
    not find_spec("schemathesis"), reason="schemathesis is not installed: pip install -e '.[clients]'"
)
def test_no_request_that_follows_the_schema_or_breaks_it_is_answered_otherwise_than_documented(
    server: Any, tmp_path: Path
) -> None:
    command = [
        "run",
        f"{server.url}/openapi.json",
        "--max-examples=5",
        "--phases=coverage,fuzzing",
        "--seed=1",
    ]
    checks = ",".join((*CHECKS, "response_schema_conformance"))
    script = "import sys; from schemathesis.cli import schemathesis; schemathesis(sys.argv[1:])"
    ran = subprocess.run(
        [sys.executable, "-c", script, *command, f"--checks={checks}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    generated = re.search(r"(\d+) generated", ran.stdout)
    assert generated is not None
    assert int(generated[1]) > 500
