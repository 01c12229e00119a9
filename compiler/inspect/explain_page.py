"""What was compiled, as one self-contained HTML page: the model as a strip of pieces, each to be opened."""

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ...common.store import Store
from ..codegen.inductor import Artifact
from ..execution.plan import Compiled
from ..passes.pipeline import PIPELINE
from .traffic import Launch, launches

STYLE = (Path(__file__).parent / "explain_page.css").read_text(encoding="utf-8")
# A link to a piece opens it; without scripts it only leads there.
SCRIPT = """
function show() {
  const piece = document.getElementById(location.hash.slice(1));
  if (piece) piece.open = true;
}
addEventListener("hashchange", show); show();
"""
NUMBER = re.compile(r"%\d+")  # a node's: a new one shifts all behind it, which is no difference
OBVIOUS = re.compile(r"call_function |@\w+(:\d+)?")  # on nearly every line, and nothing to compare by
LINES_ALIKE = 3  # around what differs
SHOWN_TOKENS = (1, 64)  # numbers of tokens for which bytes moved are worked out
HUES = (212, 152, 32, 282, 352, 92, 182, 62)  # of the unique pieces, in turn


def explain_page(
    compiled: Compiled, store: Store, *, title: str, numerics: str, graphs: Sequence[Any] = ()
) -> str:
    """The page. graphs: what each CUDA graph holds and served, where the model is loaded."""
    pieces = compiled.plan.pieces
    body = [
        f"<h1>{escape(title)}</h1>",
        _summary(compiled, numerics),
        _strip(compiled),
        *(_piece(compiled, number, piece.artifact, store) for number, piece in enumerate(pieces)),
        _whole_model(compiled),
        _guards(compiled.guards),
        _cuda_graphs(graphs),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · Lamina</title><style>{STYLE}</style></head><body><main>"
        + "\n".join(body)
        + f"</main><script>{SCRIPT}</script></body></html>\n"
    )


def _summary(compiled: Compiled, numerics: str) -> str:
    facts = {
        "pieces": f"{compiled.num_pieces}, of which {len(compiled.plan.pieces)} are unique",
        "from the cache": f"{compiled.num_loaded} loaded, {compiled.num_compiled} compiled",
        "why compiled": compiled.miss or "nothing was: everything lay in the cache",
        "numerics": NUMERICS[numerics],
        "seconds": ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in compiled.seconds.items()),
    }
    return _table(facts.items())


CHECKED = "against the same piece run op by op, both against float64, when it was made"
NUMERICS = {
    "fast": "fast: code may fuse, and rounds to the model's dtype wherever the model does",
    "exact": "exact: compiled is eager bit for bit",
}


def _strip(compiled: Compiled) -> str:
    """Every call of the plan in order; a piece leads to its description."""
    items = []
    for step in compiled.plan.steps:
        if step.piece is None:
            items.append(f'<span class="attention" title="attention of layer {step.layer}"></span>')
        else:
            hue = HUES[step.piece % len(HUES)]
            link = f'href="#piece-{step.piece}" title="piece {step.piece}"'
            items.append(f'<a class="block" style="--hue:{hue}" {link}>{step.piece}</a>')
    legend = "Each number is a piece of the model and leads to it; thin bars are attention."
    return f'<h2>The model</h2><nav class="strip">{"".join(items)}</nav><p class="note">{legend}</p>'


def _piece(compiled: Compiled, number: int, artifact: Artifact, store: Store) -> str:
    uses = sum(step.piece == number for step in compiled.plan.steps)
    origin = "compiled" if compiled.plan.pieces[number].was_compiled else "loaded from the cache"
    facts = {
        "came": f"{origin}, took {artifact.seconds:.1f} s to make",
        "checked": CHECKED if artifact.is_checked else "no: CompileConfig(verify=False)",
        "key": f"<code>{artifact.key[:16]}</code>",
    }
    sections = [
        _table(facts.items(), is_html=True),
        _foldable("Source line → ATen", _origins(artifact, store)),
        _foldable("Passes", "".join(_passes(artifact, store)), is_open=True),
        _foldable("Graph after the passes", f"<pre>{escape(_last_graph(artifact, store))}</pre>"),
        _foldable("Kernels", _kernels(launches(artifact, store)), is_open=True),
        _foldable("Generated source", f"<pre>{escape(_text(store, artifact.source))}</pre>"),
    ]
    hue = HUES[number % len(HUES)]
    is_open = " open" if number == min(1, len(compiled.plan.pieces) - 1) else ""
    return (
        f'<details class="piece" id="piece-{number}" style="--hue:{hue}"{is_open}>'
        f"<summary><h2>Piece {number}</h2><span>used {uses}×</span></summary>"
        f"{''.join(sections)}</details>"
    )


def _origins(artifact: Artifact, store: Store) -> str:
    """The lines of the model's code, each with the operations that it became."""
    rows = []
    for origin in json.loads(_text(store, artifact.origins)):
        line = f"<code>{escape(origin['line'])}</code><br><small>{escape(origin['place'])}</small>"
        operations = "<br>".join(f"<code>{escape(operation)}</code>" for operation in origin["operations"])
        rows.append((line, operations))
    return _rows(("the model's code", "operations"), rows)


def _passes(artifact: Artifact, store: Store) -> Iterator[str]:
    known = {step.name: step for step in PIPELINE}
    before, any_changed = _text(store, artifact.graph_before), False
    for report, digest in zip(artifact.reports, artifact.stages, strict=True):
        after, step = _text(store, digest), known.get(report["name"])
        sites = [f"<li>taken: {escape(reason)}</li>" for reason in report["chosen"]]
        sites += [f"<li>left alone: {escape(reason)}</li>" for reason in report["skipped"]]
        contract = f"<p>{escape(step.reason)}. Rounding: {escape(step.contract)}.</p>" if step else ""
        content = f"{contract}<ul>{''.join(sites)}</ul>" + _side_by_side(before, after)
        number, opens = report["num_matches"], not any_changed and before != after
        sites_found = f"{number} site{'s' * (number > 1)}" if number else "no site"
        yield _foldable(f"{report['name']}: {sites_found}", content, is_open=opens, kind="pass")
        before, any_changed = after, any_changed or opens


def _last_graph(artifact: Artifact, store: Store) -> str:
    return _text(store, artifact.stages[-1] if artifact.stages else artifact.graph_before)


def _side_by_side(before: str, after: str) -> str:
    """Both graphs next to each other: what differs, marked, amid a few lines that do not."""
    if before == after:
        return '<p class="note">The graph is the same before and after.</p>'
    left, right = before.splitlines(), after.splitlines()
    columns: tuple[list[str], list[str]] = ([], [])
    unnumbered = [[NUMBER.sub("%", line) for line in lines] for lines in (left, right)]
    matcher = difflib.SequenceMatcher(None, unnumbered[0], unnumbered[1], False)
    for number, hunk in enumerate(matcher.get_grouped_opcodes(LINES_ALIKE)):
        for column in columns:
            column += ["⋯"] * (number > 0)
        for kind, a, b, c, d in hunk:
            height = max(b - a, d - c)
            for column, lines, mark in ((columns[0], left[a:b], "del"), (columns[1], right[c:d], "ins")):
                shown = [escape(OBVIOUS.sub("", line)) for line in lines]
                column += shown if kind == "equal" else [f"<{mark}>{line}</{mark}>" for line in shown]
                column += [" "] * (height - len(lines))
    halves = (
        f"<div><h4>{name}</h4><pre>{chr(10).join(column)}</pre></div>"
        for name, column in zip(("before", "after"), columns, strict=True)
    )
    return f'<div class="columns">{"".join(halves)}</div>'


def _kernels(found: Sequence[Launch]) -> str:
    header = ("launch", "provider", *(f"bytes, T = {tokens}" for tokens in SHOWN_TOKENS), "registers")
    rows = [
        (
            f"<code>{escape(launch.name.replace('torch.ops.lamina.', 'lamina::'))}</code>",
            escape(launch.provider),
            *(_bytes(launch.bytes_for(tokens)) for tokens in SHOWN_TOKENS),
            "–" if launch.num_registers is None else str(launch.num_registers),
        )
        for launch in found
    ]
    total = [sum(launch.bytes_for(tokens) for launch in found) for tokens in SHOWN_TOKENS]
    rows.append(("all", "", *map(_bytes, total), ""))
    return _rows(header, rows)


def _whole_model(compiled: Compiled) -> str:
    if not compiled.plan.reports:
        return ""
    rows = [
        (
            escape(report["name"]),
            str(report["num_matches"]),
            _counted((*report["chosen"], *report["skipped"])),
        )
        for report in compiled.plan.reports
    ]
    return "<h2>Passes over the whole model</h2>" + _rows(("pass", "sites", "reasons"), rows)


def _counted(sites: Sequence[str]) -> str:
    """Reasons without the sites that they are given for, which are alike but for a number."""
    counts = Counter(site.partition(": ")[2] or site for site in sites)
    return "<br>".join(f"{number} × {escape(reason)}" for reason, number in counts.items())


def _guards(guards: Sequence[Mapping[str, str]]) -> str:
    by_disposition: dict[str, Counter[str]] = {}
    for guard in guards:
        by_disposition.setdefault(guard["disposition"], Counter())[guard["kind"]] += 1
    rows = [
        (
            escape(disposition),
            str(kinds.total()),
            escape(", ".join(f"{n} {kind}" for kind, n in kinds.items())),
        )
        for disposition, kinds in sorted(by_disposition.items())
    ]
    note = '<p class="note">What the trace took for granted, and why it cannot break unseen.</p>'
    return f"<h2>Guards</h2>{note}" + _rows(("what becomes of them", "number", "kinds"), rows)


def _cuda_graphs(graphs: Sequence[Any]) -> str:
    if not graphs:
        text = "None: they are captured where weights are loaded, on a GPU: Runtime.explain_html()."
        return f'<h2>CUDA graphs</h2><p class="note">{text}</p>'
    rows = [
        (
            escape(f"{type(record.key).__name__} {record.key.size}"),
            _bytes(record.bytes),
            f"{record.milliseconds:.1f} ms",
            str(record.num_replays),
            f"{record.num_padded_tokens} of {record.num_tokens + record.num_padded_tokens}",
        )
        for record in graphs
    ]
    return "<h2>CUDA graphs</h2>" + _rows(("size", "memory", "to capture", "replays", "padding tokens"), rows)


def _foldable(title: str, content: str, *, is_open: bool = False, kind: str = "part") -> str:
    state = " open" if is_open else ""
    return f'<details class="{kind}"{state}><summary>{escape(title)}</summary>{content}</details>'


def _table(facts: Any, *, is_html: bool = False) -> str:
    cells = ((name, value if is_html else escape(value)) for name, value in facts)
    rows = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in cells)
    return f"<dl>{rows}</dl>"


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(store: Store, digest: str) -> str:
    return store.get(digest).decode()


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"
