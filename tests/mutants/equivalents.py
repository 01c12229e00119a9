"""Mutants that do what the kernel does, each with the reason: equivalent.json says so."""

import json
from fnmatch import fnmatchcase
from pathlib import Path

from .pool import Case

ARGUED = Path(__file__).with_name("equivalent.json")


class Equivalents:
    """The list: by source, the line as it was, the line as it is (* stands for anything), and why."""

    def __init__(self, entries: list[dict[str, str]] | None = None) -> None:
        self.entries: list[dict[str, str]] = json.loads(ARGUED.read_text()) if entries is None else entries

    def explains(self, case: Case) -> bool:
        """Whether somebody argued that a mutant changes nothing that can be seen."""
        return any(
            entry["file"] == case.file
            and _is_like(case.mutant.old_line, entry["line"])
            and _is_like(case.mutant.new_line, entry.get("mutant", "*"))
            for entry in self.entries
        )


def _is_like(line: str, pattern: str) -> bool:
    """fnmatch with * alone: brackets and question marks of C++ are themselves."""
    return fnmatchcase(line, pattern.replace("[", "[[]").replace("?", "[?]"))
