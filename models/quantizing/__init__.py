"""Checkpoints written with their projections quantized, as compressed-tensors describes them."""
