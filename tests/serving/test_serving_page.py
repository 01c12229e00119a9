"""docs/serving.md is true: its fields are those of the structs, its routes the server's, its snippets run."""

import gc
import re
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from lamina.cli import app
from lamina.serving.protocol.decoding import Body
from lamina.serving.protocol.messages import Conversation, MessagesRequest
from lamina.serving.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from lamina.serving.routes.openapi import endpoints_of

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "serving.md").read_text()
KINDS = {
    "messages": MessagesRequest,
    "count_tokens": Conversation,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
}
RUN = re.compile(r"<!-- run by .*? -->\n```(python|sh)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SNIPPETS = RUN.findall(PAGE)
CODE = re.compile(r"`([^`]+)`")


def tables() -> dict[str, dict[str, str]]:
    """What the page says of each field of each kind of request."""
    said: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    for table in re.findall(r"^\| field \|.*?(?=\n\n)", PAGE, re.DOTALL | re.MULTILINE):
        head, _, *rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()]
        for row in rows:
            for column in (1, 2):
                kind, standing = head[column].strip(), row[column].strip()
                assert standing in ("served", "ignored", "refused", "–"), row
                for field in CODE.findall(row[0]):
                    assert field not in said[kind], f"{field} stands in the table twice"
                    said[kind][field] = standing
    return {kind: {f: s for f, s in fields.items() if s != "–"} for kind, fields in said.items()}


@pytest.fixture(scope="module")
def named_server(start_server: Callable[..., Any]) -> Any:
    """The server as the page starts it."""
    return start_server(model_names=("smollm2",))


@pytest.mark.parametrize("name", KINDS)
def test_the_table_of_fields_is_what_the_structs_say(name: str) -> None:
    kind: type[Body] = KINDS[name]
    true = dict.fromkeys(kind.unserved, "refused") | dict.fromkeys(kind.accepted, "ignored")
    true |= {field.encode_name: "served" for field in msgspec.structs.fields(kind)}
    assert tables()[name] == true


def test_every_route_of_the_server_is_on_the_page(server: Any) -> None:
    listed = PAGE[PAGE.index("## Endpoints") : PAGE.index("## Fields")]
    said = set(re.findall(r"`(GET|POST|DELETE) (/[^`]*)`", listed))
    real = {(each.method, each.path) for each in endpoints_of(server.server.app.routes)}
    assert said == real


def test_every_option_on_the_page_is_one_of_the_command() -> None:
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    serve = command.commands["serve"]
    known = {name for parameter in serve.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert set(re.findall(r"(?<=[`( ])--[a-z-]+", PAGE)) <= known
    assert CliRunner().invoke(app, ["serve", "--help"]).exit_code == 0


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
@pytest.mark.filterwarnings("default")  # some are of packages that are not ours to mend
def test_snippets_run(
    named_server: Any, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    language, text = SNIPPETS[number]
    for package in ("litellm", "langchain_openai"):
        if package in text and not find_spec(package):
            pytest.skip(f"{package} is not installed: pip install -e '.[clients]'")
    if language == "sh" and not shutil.which("curl"):
        pytest.skip("no curl on this machine")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    text = text.replace("http://127.0.0.1:8000", named_server.url)
    if language == "python":
        exec(compile(text, f"serving.md, snippet {number}", "exec"), {})
        assert capsys.readouterr().out
        gc.collect()  # clients that a snippet left open, while their warnings are no errors
    else:
        ran = subprocess.run(["bash", "-ec", text], capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
        assert "data: [DONE]" in ran.stdout
        assert '"count":' in ran.stdout
        assert '"error"' not in ran.stdout
