"""Write the table of docs/monitoring.md: every figure of /metrics with its kind, meaning and labels."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from lamina.serving.metrics.families import FAMILIES, PREFIX, Family  # noqa: E402

PAGE = ROOT / "docs" / "monitoring.md"
HEADING = "| figure | kind | is |\n|---|---|---|\n"


def render() -> str:
    """The page as it should be now; the table is its end."""
    before, heading, _ = PAGE.read_text().partition(HEADING)
    return before + heading + "".join(_row(family) for family in FAMILIES)


def _row(family: Family) -> str:
    name = PREFIX + family.name + ("_total" if family.kind == "counter" else "")
    labels = f" By {', '.join(f'`{label}`' for label in family.labels)}." if family.labels else ""
    return f"| `{name}` | {family.kind} | {family.help}{labels} |\n"


if __name__ == "__main__":
    PAGE.write_text(render())
