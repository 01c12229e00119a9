"""Grammars for structured outputs, and the masks of the tokens that they leave."""
