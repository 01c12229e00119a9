"""Write the table of docs/warm_start.md: what a plan could depend on, and what becomes of it."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from lamina.compiler.inspect.factors import table  # noqa: E402  (the line above says where it is)

PAGE = ROOT / "docs" / "warm_start.md"
START, END = "<!-- factors -->\n", "<!-- /factors -->"


def render() -> str:
    """The page as it should be now."""
    before, rest = PAGE.read_text().split(START)
    return f"{before}{START}{table()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(render())
