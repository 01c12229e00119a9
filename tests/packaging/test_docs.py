"""What the documents say about the tree is true of the tree."""

import dataclasses
import json
import re
import runpy
from importlib import import_module
from pathlib import Path

import pytest

import lamina
from lamina.cli.fields import read_fields

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    text = page.read_text()
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r'\bsrc(?:set)?="([^"]+)"', text)
    local = [target for target in targets if "://" not in target]
    assert not [target for target in local if not (page.parent / target).exists()]


def test_structures_page_is_what_the_files_say():
    page = runpy.run_path(str(ROOT / "docs" / "write_structures.py"))
    assert page["PAGE"].read_text() == page["render"](), "run `make format`"


SETTINGS = runpy.run_path(str(ROOT / "docs" / "write_settings.py"))


def test_settings_page_is_what_the_configs_say():
    assert SETTINGS["PAGE"].read_text() == SETTINGS["render"](), "run `make format`"


def test_the_table_of_metrics_is_what_the_server_tells():
    page = runpy.run_path(str(ROOT / "docs" / "write_metrics.py"))
    assert page["PAGE"].read_text() == page["render"](), "run `make format`"


def test_the_table_of_factors_is_what_the_compiler_does():
    page = runpy.run_path(str(ROOT / "docs" / "write_factors.py"))
    assert page["PAGE"].read_text() == page["render"](), "run `make format`"


def test_the_reference_has_every_public_name():
    """Errors stand on a page of their own, which takes the whole module."""
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    errors = {name for name in lamina.__all__ if name in vars(lamina.common.errors)}
    names = set(lamina.__all__) - errors
    assert not [name for name in names if f"::: lamina.{name}\n" not in pages]
    assert "::: lamina.common.errors\n" in pages


def test_the_plots_are_those_of_the_results():
    module = runpy.run_path(str(ROOT / "docs" / "draw_plots.py"))
    drawn = {path.name: path.read_text() for path in module["FOLDER"].iterdir()}
    assert drawn == module["plots"](), "run `make format`"


@pytest.mark.parametrize("config", SETTINGS["CONFIGS"], ids=lambda config: config[-1])
def test_every_field_has_a_sentence_a_type_and_its_true_default(config):
    """What is read from the source is what the dataclass has: the page and the options lack nothing."""
    path, class_name = config[-2:]
    kind = getattr(import_module(f"lamina.{path.removesuffix('.py').replace('/', '.')}"), class_name)
    read = read_fields(path, class_name)
    assert [field.name for field in read] == [field.name for field in dataclasses.fields(kind)]
    for field, real in zip(read, dataclasses.fields(kind), strict=True):
        assert re.fullmatch(r"[A-Z0-9a-z].{10,}[.]", field.sentence), field
        default = None if real.default is dataclasses.MISSING else repr(real.default).replace('"', "'")
        assert default == field.default, field.name
        assert field.type, field.name


def test_every_variable_of_the_environment_is_documented():
    read = set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', (ROOT / "common" / "env.py").read_text()))
    assert {name for name in read if name.startswith(("LAMINA", "CXX", "CUDA", "HF"))} <= set(
        re.findall(r"`(\w+)`", SETTINGS["VARIABLES"])
    )


def test_table_of_the_readme_is_that_of_the_results():
    table = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))
    readme = (ROOT / "README.md").read_text()
    assert (table["MARKS"][0] in readme) == table["RESULT"].exists()
    if table["RESULT"].exists():
        wanted = table["place"](readme, table["render"](json.loads(table["RESULT"].read_text())))
        assert readme == wanted, "run `python benchmarks/table.py --write`"
