"""What was compiled, explained and verified."""
