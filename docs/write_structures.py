"""Write docs/structures.md: every file of the library with the sentence it opens with."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "structures.md"
# From the top of the imports down.
FOLDERS = ("cli", "testing", "runtime", "models", "compiler", "custom_ops", "common")
OPENING = """# Every file in a sentence

Written by `make format` out of the files themselves. Upper folders import from lower ones.
"""


def render() -> str:
    """The page as it should be now."""
    return OPENING + "".join(_section(ROOT / folder) for folder in FOLDERS)


def _section(folder: Path) -> str:
    rows = "".join(
        f"| [{path.relative_to(folder)}](../{path.relative_to(ROOT)}) | {_sentence(path)} |\n"
        for path in sorted(folder.rglob("*.py"))
        if path.name != "__init__.py"
    )
    return f"\n## {folder.name}\n\n{_sentence(folder / '__init__.py')}\n\n| file | is |\n|---|---|\n{rows}"


def _sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.partition("\n")[0].replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render())
