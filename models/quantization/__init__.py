"""Quantization schemes, a file each."""
