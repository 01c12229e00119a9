"""What the documents say about the tree is true of the tree."""

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert not [target for target in local if not (page.parent / target).exists()]


def test_structures_page_is_what_the_files_say():
    page = runpy.run_path(str(ROOT / "docs" / "write_structures.py"))
    assert page["PAGE"].read_text() == page["render"](), "run `make format`"


def test_table_of_the_readme_is_that_of_the_results():
    table = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))
    readme = (ROOT / "README.md").read_text()
    assert (table["MARKS"][0] in readme) == table["RESULT"].exists()
    if table["RESULT"].exists():
        wanted = table["place"](readme, table["render"](json.loads(table["RESULT"].read_text())))
        assert readme == wanted, "run `python benchmarks/table.py --write`"
