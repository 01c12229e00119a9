"""Rewrites of a piece's ATen graph, each a pure function with a report and a rounding contract."""

from ... import custom_ops as custom_ops  # registers the ops that passes look for and write
