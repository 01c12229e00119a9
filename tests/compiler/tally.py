"""What was proved of the passes and of plans, in numbers."""

from collections import Counter

# programs, sites planted, sites found; faults put in, faults caught; surroundings of plans
PROVED: Counter[str] = Counter()
