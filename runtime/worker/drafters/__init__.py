"""Drafters that are models, with keys and values of their own beside those of the model that they serve."""
