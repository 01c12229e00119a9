"""What README and docs show is run: Python against a TINY model, command lines against the real parsers.

A fenced block that cannot run here has a line `<!-- not run: WHY -->` above it, one that another test runs
`<!-- run by tests/… -->`. Either way its Python is compiled and its options are looked up.
"""

import json
import re
import shlex
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from lamina.cli import app
from lamina.models.quantization import scheme

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?:<!-- (not run|run by):? (.+?) -->\n)?```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LANGUAGES = {"python", "sh", "toml", "dockerfile", "mermaid", "cpp", "cuda", "text", ""}
# What pages call a model that the reader has; a TINY one stands in.
MODELS = re.compile(r'"(folder|folder, hub id or file\.gguf|cache_dir/models/[^"]+\.gguf)"')
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@dataclass(frozen=True)
class Snippet:
    page: Path
    line: int
    language: str
    text: str
    marker: str | None
    why: str | None


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text()
    return [
        Snippet(page, text[: found.start(4)].count("\n"), found[3], found[4], found[1], found[2])
        for found in FENCE.finditer(text)
    ]


SNIPPETS = {page: snippets(page) for page in PAGES}
WITH_PYTHON = [page for page, found in SNIPPETS.items() if any(one.language == "python" for one in found)]
COSTLY = {"quantization.md"}  # pages that quantize and load a model some times


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tiny_text_folder) -> Path:
    """A TINY model that takes as many positions as the pages ask for; kernels are the checkout's."""
    folder = tmp_path_factory.mktemp("page") / "model"
    shutil.copytree(tiny_text_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return folder


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.long if page.name in COSTLY else (), id=page.name)
        for page in WITH_PYTHON
    ],
)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, model_folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scheme, "_schemes", {**scheme._schemes})  # what a page registers is its own
    names: dict[str, object] = {"__name__": "snippets"}
    for snippet in SNIPPETS[page]:
        if snippet.language == "python":
            text = "\n" * snippet.line + MODELS.sub(repr(str(model_folder)), snippet.text)
            code = compile(text, str(page), "exec")  # errors name the line of the page
            if snippet.marker is None:
                exec(code, names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_are_of_a_kind_that_is_checked_and_markers_say_why(page):
    text = page.read_text()
    assert len(re.findall(r"^```\w*$", text, re.MULTILINE)) == 2 * len(SNIPPETS[page])
    assert len(re.findall(r"<!-- (?:not run|run by)", text)) == sum(
        one.marker is not None for one in SNIPPETS[page]
    )
    for snippet in SNIPPETS[page]:
        assert snippet.language in LANGUAGES, f"{page.name}:{snippet.line}"
        if snippet.language == "toml":
            tomllib.loads(snippet.text)
        if snippet.marker == "run by":
            assert page.name in (ROOT / snippet.why).read_text()
        elif snippet.marker:
            assert len(snippet.why.split()) >= 3, f"{page.name}:{snippet.line}: a reason is a few words"


COMMANDS = [
    pytest.param(snippet, line, id=f"{page.name}: {line[:50]}")
    for page, found in SNIPPETS.items()
    for snippet in found
    if snippet.language in ("sh", "dockerfile", "")
    for line in re.sub(r"\\\n\s*", "", snippet.text).splitlines()
    if snippet.language or re.match(r"(lamina|make|python) ", line)
    if line.strip() and not line.startswith(("#", "ENV "))
]


@pytest.mark.parametrize("snippet, line", COMMANDS)
def test_a_command_line_is_one_that_the_command_takes(snippet, line):
    known = [check_command(part.removeprefix("RUN ")) for part in re.split(r"\s+&&\s+", line)]
    assert all(known) or snippet.marker, "no check knows this command: say why it is not run, or by what"


def test_commands_named_in_sentences_are_real():
    for page in PAGES:
        for words in re.findall(
            r"`lamina ([a-z][^`\n]*)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        ):
            check_lamina(
                [word for word in shlex.split(words.replace("…", "")) if word not in ("-h", "--help")],
                whole=False,
            )
        for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
            assert target in TARGETS, f"{page.name}: make {target}"


def check_command(command: str) -> bool:
    """Whether some check knows the command; it fails where the command is wrong."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # variables set for the command
        del words[0]
    match words:
        case ["lamina", *arguments]:
            check_lamina(arguments)
        case ["make", *arguments]:
            assert {word for word in arguments if "=" not in word} <= TARGETS
        case ["python", "-m", module, *_]:
            file = ROOT / module.replace(".", "/")
            places = (
                file.with_suffix(".py"),
                file / "__main__.py",
                ROOT / "src" / file.relative_to(ROOT) / "__main__.py",
            )
            assert module == "pytest" or any(place.exists() for place in places), module
        case ["python", script, *arguments] if (ROOT / script).exists():
            source = (ROOT / script).read_text()
            assert not [word for word in arguments if word.startswith("--") and f'"{word}"' not in source]
        case ["source", ".venv/bin/activate"] | ["python", "try.py"]:
            pass
        case _:
            return False
    return True


def check_lamina(arguments: list[str], whole: bool = True) -> None:
    """The command line parses, values and all; not whole, it may lack what must be given."""
    command = typer.main.get_command(app)
    context = command.make_context("lamina", [], resilient_parsing=True)
    try:
        while hasattr(command, "commands") and arguments and not arguments[0].startswith("-"):
            name, command, arguments = command.resolve_command(context, arguments)
        if not hasattr(command, "commands"):
            command.make_context(name, list(arguments), parent=context)
    except Exception as error:
        if whole or type(error).__name__ != "MissingParameter":
            raise
