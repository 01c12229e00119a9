"""A server under load, whichever OpenAI-compatible one it is: closed loop by concurrency, open loop by rate.

Every request is a prompt of token ids to /v1/completions, so servers of the same model are asked the same.
It prints a line a load and writes JSON: output tokens/s, time to first token, time between tokens, and the
goodput, requests/s of which the first token and the mean time between tokens kept within the limits given.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

LIMIT = aiohttp.ClientTimeout(total=None, sock_connect=60, sock_read=600)


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
    error: str | None = None

    @property
    def first(self) -> float:
        """Seconds to the first piece."""
        return self.arrivals[0]

    @property
    def between(self) -> float:
        """Mean seconds between tokens, 0.0 of a single one."""
        return (self.arrivals[-1] - self.first) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


def main() -> None:
    """Print a line a load, and write JSON where --output says."""
    options = _parser().parse_args()
    loads = [("concurrency", number) for number in options.concurrency]
    loads += [("rate", number) for number in options.rate]
    document = {
        "date": time.strftime("%Y-%m-%d"),
        "label": options.label,
        "server": options.base_url,
        "loads": [],
    }
    print(HEADER, flush=True)
    for kind, number in loads:
        asked = workload(options, kind, number)
        answered, seconds = run(options, kind, number, asked)
        row = {kind: number} | summary(answered, seconds, options.slo_first, options.slo_between)
        document["loads"].append(row)
        print(line(kind, number, row), flush=True)
        if options.output:
            options.output.write_text(json.dumps(document, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="the name to ask by; the server's first if not given")
    parser.add_argument("--api-key", default="none")
    parser.add_argument(
        "--concurrency", type=int, nargs="*", default=[], help="closed loop: so many at a time"
    )
    parser.add_argument(
        "--rate", type=float, nargs="*", default=[], help="open loop: Poisson, so many a second"
    )
    parser.add_argument(
        "--requests", type=int, help="of each load; 4 times the concurrency, or 30 s of a rate"
    )
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[128, 1024], metavar=("LOW", "HIGH"))
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--ids", type=int, nargs=2, default=[1000, 120000], help="range of token ids")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--slo-first", type=float, default=1.0, help="seconds to the first token")
    parser.add_argument("--slo-between", type=float, default=0.05, help="seconds between tokens, as a mean")
    parser.add_argument("--processes", type=int, default=1, help="clients that share the load")
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


def run(
    options: argparse.Namespace, kind: str, number: float, asked: list[Asked]
) -> tuple[list[Answered], float]:
    """Every answer, and the seconds from the first request to the end of the last answer."""
    shares = [asked[index :: options.processes] for index in range(options.processes)]
    at_once = [len(range(index, int(number), options.processes)) for index in range(options.processes)]
    jobs = [
        (options, share, width if kind == "concurrency" else None)
        for share, width in zip(shares, at_once, strict=True)
        if share and (width or kind == "rate")
    ]
    if len(jobs) == 1:
        found = [_client(*jobs[0])]
    else:
        with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
            found = pool.starmap(_client, jobs)
    begun, ended = min(each[1] for each in found), max(each[2] for each in found)
    return [answer for answers, _, _ in found for answer in answers], ended - begun


def _client(
    options: argparse.Namespace, asked: list[Asked], at_once: int | None
) -> tuple[list[Answered], float, float]:
    return asyncio.run(_ask_all(options, asked, at_once))


async def _ask_all(
    options: argparse.Namespace, asked: list[Asked], at_once: int | None
) -> tuple[list[Answered], float, float]:
    headers = {"Authorization": f"Bearer {options.api_key}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=LIMIT) as session:
        model = options.model or await _first_model(session, options.base_url)
        slots = asyncio.Semaphore(at_once or len(asked))
        begun = time.monotonic()

        async def ask(one: Asked) -> Answered:
            if at_once is None:
                await asyncio.sleep(begun + one.at - time.monotonic())
            async with slots:
                return await _ask(session, options, model, one)

        answers = await asyncio.gather(*map(ask, asked))
        return list(answers), begun, time.monotonic()


async def _first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    async with session.get(f"{base_url}/models") as response:
        response.raise_for_status()
        return str((await response.json())["data"][0]["id"])


async def _ask(
    session: aiohttp.ClientSession, options: argparse.Namespace, model: str, one: Asked
) -> Answered:
    body = {
        "model": model,
        "prompt": one.prompt,
        "max_tokens": one.max_tokens,
        "temperature": options.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer, begun = Answered(), time.monotonic()
    try:
        async with session.post(f"{options.base_url}/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"{response.status}: {(await response.text())[:200]}"
            else:
                await _read(response, answer, begun)
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = repr(error)
    answer.seconds = time.monotonic() - begun
    if answer.error is None and not (answer.arrivals and answer.num_tokens):
        answer.error = "the stream had no text, or no usage"
    return answer


async def _read(response: aiohttp.ClientResponse, answer: Answered, begun: float) -> None:
    """Note when pieces of text arrive, and how many tokens the server counted."""
    async for event in _events(response):
        if event.get("error"):
            answer.error = str(event["error"])[:200]
        if any(choice.get("text") or choice.get("token_ids") for choice in event.get("choices", ())):
            answer.arrivals.append(time.monotonic() - begun)
        if event.get("usage"):
            answer.num_tokens = event["usage"]["completion_tokens"]


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for raw in response.content:
        if raw.startswith(b"data: ") and raw.strip() != b"data: [DONE]":
            yield json.loads(raw[6:])


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


if __name__ == "__main__":
    main()
