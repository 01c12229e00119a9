"""Rewrites of a piece's ATen graph, each a pure function with a report and a rounding contract."""

from ... import custom_ops as custom_ops  # registers the ops that passes look for and write
from .canonicalise import CANONICALISE
from .graph import Pass, PassReport, copy_graph, dtype_of, emit, erase_dead, replace, shape_of
from .match import Any_, Call, Match, find
from .pipeline import PASS_NAMES, all_but

__all__ = [
    "CANONICALISE",
    "PASS_NAMES",
    "Any_",
    "Call",
    "Match",
    "Pass",
    "PassReport",
    "all_but",
    "copy_graph",
    "dtype_of",
    "emit",
    "erase_dead",
    "find",
    "replace",
    "shape_of",
]
