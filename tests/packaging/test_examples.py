"""Examples for programs of asyncio run as they stand, but for the name of the model."""

import ast
import asyncio
import json
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def test_the_notebook_runs_from_top_to_bottom(tiny_text_folder, capsys):
    """As Jupyter runs it: all cells in one event loop, each may await."""
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, object] = {}

    async def run() -> None:
        for number, cell in enumerate(cells):
            text = cell.replace('"folder"', f'{str(tiny_text_folder)!r}, compile=False, device="cpu"')
            code = compile(text, f"cell {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            pending = eval(code, names)
            if asyncio.iscoroutine(pending):
                await pending

    asyncio.run(run())
    answers = names["answers"]
    assert isinstance(answers, list)
    assert len(answers) == 2
    assert capsys.readouterr().out
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "what it printed is not kept"


def test_an_application_of_fastapi_streams_and_refuses(tiny_text_folder, monkeypatch):
    pytest.importorskip("fastapi", reason="FastAPI is not installed")
    from starlette.testclient import TestClient

    monkeypatch.setenv("MODEL", str(tiny_text_folder))
    app = runpy.run_path(str(EXAMPLES / "fastapi_app.py"))["app"]
    with TestClient(app) as client:
        assert client.get("/health").json() == {"status": "ok"}
        answer = client.post("/generate", json={"prompt": "hello", "max_tokens": 8})
        assert answer.status_code == 200
        assert answer.text
        refused = client.post("/generate", json={"prompt": "hello", "max_tokens": -1})
        assert (refused.status_code, "max_tokens" in refused.text) == (400, True)
    assert not app.state.runtime.health().ok
