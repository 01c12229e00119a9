"""What was proved of the passes, in numbers."""

from collections import Counter

PROVED: Counter[str] = Counter()  # programs, sites planted, sites found; faults put in, faults caught
