"""Heads that draft for a model from its own states; importing this registers them."""

from . import eagle1, eagle3

__all__ = ["eagle1", "eagle3"]
