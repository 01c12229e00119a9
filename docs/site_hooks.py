"""Hooks of mkdocs: pages of the root become pages of the site, links to files of the repository names."""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# Code, in which nothing is a link; or a link, whose text may be code.
CODE_OR_LINK = re.compile(r"```.*?```|`[^`\n]*`|\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """The pages of docs/ and those of the root."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its links as the site has them, code left alone."""
    source = next((name for name, made in PAGES.items() if made == page.file.src_uri), None)
    folder = ROOT if source else (ROOT / "docs" / page.file.src_uri).parent
    markdown = markdown.replace("<details>", "<details markdown>")
    if source:
        markdown = re.sub(r'(src|srcset)="docs/', r'\1="', markdown)
    return CODE_OR_LINK.sub(lambda found: _on_site(found, folder, page.file.src_uri), markdown)


def _on_site(found: re.Match[str], folder: Path, page: str) -> str:
    text, target = found.groups()
    if target is None:  # code
        return found.group()
    path, mark, anchor = target.partition("#")
    if not path or "://" in path:
        return found.group()
    file = (folder / path).resolve()
    if not file.exists() or not file.is_relative_to(ROOT):
        raise PluginError(f"{page}: no file for the link [{text}]({target})")
    name = str(file.relative_to(ROOT))
    inside = PAGES.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else None)
    if inside is None or inside.endswith(".py"):
        return f'<span title="{name} in the repository">{text}</span>'
    return f"[{text}]({'../' * page.count('/')}{inside}{mark}{anchor})"
