"""Rewrites of a piece's ATen graph, each a pure function with a report and a rounding contract."""
