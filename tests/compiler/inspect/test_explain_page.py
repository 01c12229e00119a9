"""The page about a compiled model: whole, self-contained, and true of what was compiled."""

import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from lamina.compiler.compile import compile_program
from lamina.compiler.config import CompileConfig
from lamina.compiler.execution.cuda_graphs import GraphRecord
from lamina.compiler.inspect.explain_page import explain_page
from lamina.compiler.inspect.traffic import launches
from lamina.compiler.passes.pipeline import PASS_NAMES, all_but

from ..tiny import make_tiny

pytestmark = pytest.mark.timeout(600)
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """What a page holds; raises where its tags do not close in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.ids, self.tags = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        self.links += [given[name] for name in ("href", "src", "srcset", "action") if name in given]
        self.ids += [given["id"]] if "id" in given else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def compiled(shared_store):
    config = CompileConfig(passes=all_but("linear", "add_rms_norm_linear"))  # GEMMs of the library on any CPU
    return compile_program(make_tiny().program, config, "fast", shared_store)


@pytest.fixture(scope="module")
def page(compiled, shared_store):
    graphs = [
        GraphRecord(
            key=SimpleNamespace(size=8), bytes=3 * 2**20, milliseconds=4.2, num_replays=7, num_padded_tokens=5
        )
    ]
    return explain_page(compiled, shared_store, title="<tiny> & co", numerics="fast", graphs=graphs)


def test_the_page_is_well_formed_and_needs_nothing_from_elsewhere(page):
    found = Page(page)
    assert set(found.links) == {"#piece-0", "#piece-1", "#piece-2"}
    assert found.ids == ["piece-0", "piece-1", "piece-2"]
    assert not re.search(r"https?:|@import|url\(", page)
    assert "&lt;tiny&gt; &amp; co" in page
    assert "<tiny>" not in page


def test_the_page_shows_passes_sites_contracts_guards_and_cuda_graphs(page, compiled):
    (*_, piece) = compiled.plan.pieces
    for report in piece.artifact.reports:
        assert report["name"] in PASS_NAMES
        assert f"{report['name']}: " in page
    assert "Rounding: " in page
    assert "checked again when weights bind" in page
    assert "3 MiB" in page
    assert "<del>" in page, "a pass that changed something shows what"
    assert "left alone: " in page or not any(r["skipped"] for r in piece.artifact.reports)


def test_before_and_after_show_what_differs_and_not_all_that_does_not(page, compiled, shared_store):
    (_, piece, _) = compiled.plan.pieces
    whole = shared_store.get(piece.artifact.graph_before).decode()
    columns = re.findall(
        r"<h4>before</h4><pre>(.*?)</pre></div><div><h4>after</h4><pre>(.*?)</pre>", page, re.S
    )
    assert columns
    for before, after in columns:
        assert "<del>" in before or "<ins>" in after
        assert before.count("\n") == after.count("\n"), "lines face each other"
        assert "call_function" not in before + after
    assert min(before.count("\n") for before, _ in columns) < len(whole.splitlines()) / 2


def test_lines_of_the_models_code_are_shown_without_places_of_this_machine(compiled, shared_store, page):
    lines = json.loads(shared_store.get(compiled.plan.pieces[1].artifact.origins))
    assert any("families/llama.py:" in line["place"] for line in lines)
    assert any("aten::mm" in line["operations"] for line in lines)
    assert not any(line["place"].startswith("/") for line in lines)
    assert str(shared_store.root) not in page


def test_launches_move_what_their_arguments_hold(compiled, shared_store):
    """The middle piece of TINY: o [64, 64], gate and up [256, 64], down [64, 128], q k v [128, 64]."""
    found = launches(compiled.plan.pieces[1].artifact, shared_store)
    gemms = [launch for launch in found if launch.provider == "the library"]
    weights = sum(launch.bytes_for(0) for launch in gemms)
    assert weights == 4 * (64 * 64 + 256 * 64 + 64 * 128 + 128 * 64)
    assert {launch.provider for launch in found} == {"the library", "Inductor, C++"}
    gate_up = gemms[1]
    assert gate_up.bytes_for(5) - gate_up.bytes_for(0) == 5 * 4 * (64 + 256)
