"""The only code that touches private names of torch."""
