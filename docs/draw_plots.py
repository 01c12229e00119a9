"""Draw the plots of README and docs from benchmarks/results: SVG for light and for dark pages."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FOLDER = ROOT / "docs" / "plots"
# Okabe and Ito's colours, which those who confuse red and green tell apart; grey is a bound or a third.
SERIES = ("#0072b2", "#e69f00", "#999999")
THEMES = {"light": ("#1f2328", "#d0d7de"), "dark": ("#e6edf3", "#3d444d")}
WIDTH, TOP, BAR, GAP, LEFT, RIGHT = 720, 64, 13, 14, 150, 70


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Bars in groups: a row of `values` for a label, None where there is no figure."""

    title: str
    source: str
    names: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float | None]]]
    unit: str
    one_scale: bool  # or each group one of its own


def load(name: str) -> Any:
    """What a file of benchmarks/results holds."""
    return json.loads((RESULTS / name).read_text())


def decode_plot(shape: str, name: str) -> Plot:
    """Milliseconds of a decode step on one H100: ours, vLLM's and the floor."""
    ours, peer = load("gpu_h100.json"), load("gpu_vllm.json")
    steps, theirs = ours["shapes"][shape]["decode_ms"], peer["shapes"][shape]
    return Plot(
        title=f"{name}: a decode step, ms (shorter is better)",
        source=f"{ours['machine']['gpu']}, bfloat16, random weights, {ours['machine']['date']}",
        names=("Lamina", peer["peer"], "floor: bytes and operations"),
        rows=[
            (f"batch {batch}", (step["median"], theirs[f"decode_ms_b{batch}"], step["floor"]))
            for batch, step in steps.items()
        ],
        unit="ms",
        one_scale=True,
    )


def cpu_plot() -> Plot:
    """Tokens a second on two cores: ours and llama.cpp's, at equal precision."""
    document = load("cpu.json")
    contenders = ("lamina", "llama.cpp BF16", "transformers+compile")
    medians = {(row["workload"], row["contender"]): row["median"] for row in document["results"]}
    loads = ("decode, batch 1", "decode, batch 8", "decode, batch 32", "prefill, 512 tokens")
    return Plot(
        title="SmolLM2 135M on two CPU cores, tokens/s (longer is better)",
        source=f"bfloat16, {document['machine']['cpu']}, a shared virtual machine, {document['date']}; "
        "each group has its own scale",
        names=("Lamina", *contenders[1:]),
        rows=[(workload, [medians.get((workload, name)) for name in contenders]) for workload in loads],
        unit="",
        one_scale=False,
    )


def render(plot: Plot, theme: str) -> str:
    """The plot as SVG text."""
    ink, grid = THEMES[theme]
    height = TOP + len(plot.rows) * (BAR * len(plot.names) + GAP) + 24
    body = [*_legend(plot, ink), *_bars(plot, ink, grid), _text(0, height - 6, plot.source, ink, size=11)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" font-family="system-ui, sans-serif">\n'
        f"<title>{escape(plot.title)}</title>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _legend(plot: Plot, ink: str) -> Iterator[str]:
    yield _text(0, 16, plot.title, ink, size=15, weight="bold")
    x = LEFT
    for name, colour in zip(plot.names, SERIES, strict=True):
        yield f'<rect x="{x}" y="30" width="12" height="12" fill="{colour}"/>'
        yield _text(x + 17, 40, name, ink)
        x += 40 + 7 * len(name)


def _bars(plot: Plot, ink: str, grid: str) -> Iterator[str]:
    y, of_all = TOP, max(_known(value for _, values in plot.rows for value in values))
    for label, values in plot.rows:
        longest = of_all if plot.one_scale else max(_known(values))
        yield f'<line x1="0" x2="{WIDTH}" y1="{y - GAP / 2:g}" y2="{y - GAP / 2:g}" stroke="{grid}"/>'
        yield _text(0, y + BAR * len(values) // 2 + 4, label, ink)
        for value, colour in zip(values, SERIES, strict=True):
            if value is not None:
                width = round((WIDTH - LEFT - RIGHT) * value / longest, 1)
                yield f'<rect x="{LEFT}" y="{y}" width="{width}" height="{BAR - 2}" fill="{colour}"/>'
                yield _text(
                    LEFT + width + 5, y + BAR - 3, f"{_short(value)} {plot.unit}".strip(), ink, size=11
                )
            y += BAR
        y += GAP


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _short(value: float) -> str:
    """Three figures, no exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _text(x: float, y: float, text: str, ink: str, size: int = 12, weight: str = "normal") -> str:
    bold = f' font-weight="{weight}"' if weight != "normal" else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{ink}"{bold}>{escape(text)}</text>'


def plots() -> dict[str, str]:
    """Every file of docs/plots as it should be now, by name."""
    made = {
        "decode_1b_h100": decode_plot("1b", "Llama 3.2 1B shape"),
        "decode_8b_h100": decode_plot("8b", "Llama 3.1 8B shape"),
        "cpu": cpu_plot(),
    }
    return {f"{name}_{theme}.svg": render(plot, theme) for name, plot in made.items() for theme in THEMES}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in plots().items():
        (FOLDER / name).write_text(text)
