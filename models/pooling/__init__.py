"""Models that make vectors, classes or scores in place of tokens: what their checkpoints say of it."""
