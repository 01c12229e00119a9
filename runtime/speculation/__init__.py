"""Speculative decoding as a user asks for it: who drafts, and how many tokens."""
