"""Models that take turns on one device under load: what a swap takes, and what requests wait.

Clients of every model ask in closed loops, so that every model always has work. What swaps took is read from
the server's own histogram, whose bounds are in seconds; an answer that is no answer is an error, and counted.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import workloads

from lamina.cli.info import describe_machine

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "model_swap.json"
NUM_IDS = 250  # of the tokens in prompts, so that every model has them
FIGURE = re.compile(r"^lamina:(model_swap\w+)\{(.*?)\} (\S+)$", re.MULTILINE)


@dataclass(kw_only=True)
class Asked:
    """What the clients of one model have seen: seconds to first tokens and to ends, and errors."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Counts, and seconds at the median and at most."""
        found: dict[str, Any] = {"answers": len(self.whole), "errors": len(self.errors)}
        for name, seconds in (("first_token_s", self.first), ("whole_s", self.whole)):
            if seconds:
                found[name] = {"median": round(statistics.median(seconds), 3), "max": round(max(seconds), 3)}
        return found | ({"error": self.errors[0]} if self.errors else {})


def main() -> None:
    """Print and write what swaps took; exit with 1 where a request failed or a swap took too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", help="1b, 8b (their shapes, random weights), folders or files")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=8, help="of each model")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument(
        "--limit", type=float, default=4.0, help="seconds of a swap; a bound of the histogram"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    options, more = parser.parse_known_args()  # what it does not know is for the server
    names = [f"m{number}" for number in range(len(options.models))]
    with tempfile.TemporaryDirectory() as folder, served(names, options.models, Path(folder), more) as url:
        document = asyncio.run(measure(names, url, options))
    document = {"date": time.strftime("%Y-%m-%d"), "machine": describe_machine(), "options": more} | document
    document |= {"models": options.models, "seconds": options.seconds, "clients": options.clients}
    options.output.write_text(json.dumps(document, indent=1, default=str) + "\n")
    print(json.dumps({name: document[name] for name in ("swaps", "asked")}, indent=1))
    swaps = document["swaps"]
    has_failed = any(each["errors"] for each in document["asked"].values()) or swaps["failures"]
    sys.exit(bool(has_failed or not swaps["count"] or swaps["count"] > swaps[f"within_{options.limit:g}_s"]))


@contextmanager
def served(names: list[str], models: list[str], folder: Path, options: list[str]) -> Iterator[str]:
    """A server of the models in a process of its own; its address once it is ready."""
    shapes = [model for model in models if model in workloads.SHAPES]
    paths = [str(workloads.write_config(m, folder / m)) if m in shapes else m for m in models]
    dummy = ["--load-format", "dummy", "--dtype", "bfloat16"] if shapes else []
    named = [f"{name}={path}" for name, path in zip(names, paths, strict=True)]
    command = [sys.executable, "-m", "lamina", "serve", *named, "--port", "0", *dummy, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = next((line for line in process.stdout if " at http" in line), None)
        if ready is None:
            raise SystemExit(f"the server ended with {process.wait()}")
        yield ready.rsplit(maxsplit=1)[1]
    finally:
        process.terminate()
        process.wait()


async def measure(names: list[str], url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Ask every model until the time is over, and wait for what runs."""
    asked = {name: Asked() for name in names}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout()) as session:
        before, end = await figures(session), time.monotonic() + options.seconds
        clients = [
            client(session, name, number, asked[name], options, end)
            for name in names
            for number in range(options.clients)
        ]
        await asyncio.gather(*clients)
        after = await figures(session)
    spent = {key: value - before.get(key, 0.0) for key, value in after.items()}
    return {"swaps": swaps_of(spent), "asked": {name: each.summary() for name, each in asked.items()}}


async def client(
    session: aiohttp.ClientSession,
    name: str,
    number: int,
    asked: Asked,
    options: argparse.Namespace,
    end: float,
) -> None:
    """One client that asks again as soon as it is answered."""
    source = random.Random(f"{name} {number}")
    while time.monotonic() < end:
        prompt = [source.randrange(NUM_IDS) for _ in range(options.prompt_tokens)]
        body = {"model": name, "prompt": prompt, "max_tokens": options.output_tokens}
        try:
            await ask(session, body | {"ignore_eos": True, "temperature": 0, "stream": True}, asked)
        except (aiohttp.ClientError, ValueError) as error:
            asked.errors.append(repr(error))


async def ask(session: aiohttp.ClientSession, body: dict[str, Any], asked: Asked) -> None:
    """One stream, timed; ValueError for what is no whole answer."""
    started, first, last = time.monotonic(), None, b""
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise ValueError(f"{response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                first, last = first or time.monotonic() - started, line
    if first is None or b'"error"' in last:
        raise ValueError(f"a stream ended with {last[:300]!r}")
    asked.first.append(first)
    asked.whole.append(time.monotonic() - started)


async def figures(session: aiohttp.ClientSession) -> dict[tuple[str, str], float]:
    """The server's figures of swaps, by name and bound, over all models."""
    async with session.get("/metrics") as response:
        text = await response.text()
    found: dict[tuple[str, str], float] = {}
    for name, labels, value in FIGURE.findall(text):
        bound = re.search(r'le="(.*?)"', labels)
        key = name, bound[1] if bound else ""
        found[key] = found.get(key, 0.0) + float(value)
    return found


def swaps_of(spent: dict[tuple[str, str], float]) -> dict[str, Any]:
    """Count, mean seconds, how many took at most each bound, and failures."""
    count = spent["model_swap_seconds_count", ""]
    within = {
        f"within_{float(bound):g}_s": int(value)
        for (name, bound), value in spent.items()
        if name == "model_swap_seconds_bucket" and bound != "+Inf"
    }
    mean = spent["model_swap_seconds_sum", ""] / count if count else None
    failures = int(spent["model_swap_failures_total", ""])
    return {
        "count": int(count),
        "mean_s": None if mean is None else round(mean, 3),
        **within,
        "failures": failures,
    }


if __name__ == "__main__":
    main()
