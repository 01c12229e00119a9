"""Capture, split, fingerprint, passes, code generation, store and plan; knows no model and no scheduler."""
