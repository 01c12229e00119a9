"""Checkpoints whose projections are quantized already: each dialect read into the parts of a scheme."""
