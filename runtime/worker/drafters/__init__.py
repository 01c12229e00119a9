"""Drafters: out of the text itself, or models with keys and values of their own."""
