"""Adapters by name: how many a runtime holds, which there are, and who finds others."""
