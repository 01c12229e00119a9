"""Calls of tools and reasoning: read out of what a model writes, and held to a form where that is asked."""
