"""What was proved of the scheduler and the cache, in numbers."""

from collections import Counter

SCHEDULER: Counter[str] = Counter()  # programs of the scheduler, and what happened in them
CACHE: Counter[str] = Counter()  # programs of the cache alone, without windows and with them


def in_words(counts: Counter[str]) -> str:
    """Every count, the largest first."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
