"""Answers as server-sent events."""
