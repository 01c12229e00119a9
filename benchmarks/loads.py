"""What is asked of a server or a runtime under load, and what its answers came to in figures."""

import argparse
import random
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request, and when an open loop sends it, in seconds from the start."""

    prompt: list[int]
    max_tokens: int
    at: float = 0.0


@dataclass(kw_only=True)
class Answered:
    """One answer: seconds from its request to each piece of text, and what the server counted."""

    arrivals: list[float] = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)  # milliseconds that the server says it took
    error: str | None = None

    @property
    def first(self) -> float:
        """Seconds to the first piece."""
        return self.arrivals[0]

    @property
    def between(self) -> float:
        """Mean seconds between tokens, 0.0 of a single one."""
        return (self.arrivals[-1] - self.first) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


def request_options(description: str | None) -> argparse.ArgumentParser:
    """A parser of what is asked, whoever answers."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--concurrency", type=int, nargs="*", default=[], help="closed loop: so many at a time"
    )
    parser.add_argument(
        "--requests", type=int, help="of each load; 4 times the concurrency, or 30 s of a rate"
    )
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[128, 1024], metavar=("LOW", "HIGH"))
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--ids", type=int, nargs=2, default=[1000, 120000], help="range of token ids")
    parser.add_argument("--slo-first", type=float, default=1.0, help="seconds to the first token")
    parser.add_argument("--slo-between", type=float, default=0.05, help="seconds between tokens, as a mean")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label", default="")
    parser.add_argument("--output", type=Path)
    return parser


def workload(options: argparse.Namespace, kind: str, number: float) -> list[Asked]:
    """The requests of one load: the same for the same seed, whoever serves them."""
    source = random.Random(f"{options.seed} {kind} {number}")
    count = options.requests or int(number * (4 if kind == "concurrency" else 30)) or 1
    at, asked = 0.0, []
    for _ in range(count):
        length = source.randint(*options.prompt_tokens)
        prompt = [source.randrange(*options.ids) for _ in range(length)]
        asked.append(Asked(prompt=prompt, max_tokens=options.output_tokens, at=at))
        at += source.expovariate(number) if kind == "rate" else 0.0
    return asked


def summary(
    answered: Iterable[Answered], seconds: float, slo_first: float, slo_between: float
) -> dict[str, Any]:
    """Figures of one load, times in milliseconds; failures are counted and said, never left out."""
    answered = list(answered)
    good = [each for each in answered if each.error is None]
    gaps = [
        late - early for each in good for early, late in zip(each.arrivals, each.arrivals[1:], strict=False)
    ]
    kept = sum(each.first <= slo_first and each.between <= slo_between for each in good)
    phases = {name: [each.phases[name] / 1e3 for each in good] for name in (good[0].phases if good else ())}
    return {
        "requests": len(answered),
        "failed": len(answered) - len(good),
        "errors": sorted({each.error for each in answered if each.error is not None})[:5],
        "seconds": round(seconds, 3),
        "output_tokens_s": round(sum(each.num_tokens for each in good) / seconds, 1),
        "requests_s": round(len(good) / seconds, 3),
        "goodput_requests_s": round(kept / seconds, 3),
        "slo_ms": {"first": slo_first * 1e3, "between": slo_between * 1e3},
        "first_token_ms": quantiles([each.first for each in good]),
        "between_tokens_ms": quantiles([each.between for each in good if each.num_tokens > 1]),
        "between_pieces_ms": quantiles(gaps),
        **{f"{name}_ms": quantiles(seconds_each) for name, seconds_each in phases.items()},
    }


def quantiles(seconds: list[float]) -> dict[str, float | None]:
    """The mean, median, 95th and 99th percentile, in milliseconds; None of nothing."""
    ordered = sorted(seconds)
    if not ordered:
        return dict.fromkeys(("mean", "p50", "p95", "p99"))
    last = len(ordered) - 1
    named = {f"p{share}": ordered[round(share / 100 * last)] for share in (50, 95, 99)}
    return {
        name: round(value * 1e3, 3) for name, value in {"mean": statistics.fmean(ordered), **named}.items()
    }


HEADER = (
    f"{'load':>16} {'requests':>9} {'tokens/s':>9} {'good/s':>8}"
    f" {'first ms p50 p95 p99':>28} {'between ms p50 p95 p99':>26}"
)


def line(kind: str, number: float, row: dict[str, Any]) -> str:
    """A load in one line."""

    def times(name: str) -> str:
        return " ".join(f"{row[name][key] or 0:8.2f}" for key in ("p50", "p95", "p99"))

    failed = f"  {row['failed']} FAILED: {row['errors'][0]}" if row["failed"] else ""
    rates = f"{row['requests']:>9} {row['output_tokens_s']:>9g} {row['goodput_requests_s']:>8g}"
    waits = f"{times('first_token_ms'):>28} {times('between_tokens_ms'):>26}"
    return f"{kind:>11} {number:>4g} {rates} {waits}{failed}"
