"""A server under load, whichever OpenAI-compatible one it is: closed loop by concurrency, open loop by rate.

Every request is a prompt of token ids to /v1/completions, so servers of the same model are asked the same:
of several --base-url each is asked every load in turn, by other prompts in each of --rounds.
It prints a line a load and writes JSON: output tokens/s, time to first token, time between tokens, and the
goodput, requests/s of which the first token and the mean time between tokens kept within the limits given.
"""

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

from http_loads import run
from loads import HEADER, line, request_options, summary, workload


def main() -> None:
    """Print a line a load, and write JSON where --output says."""
    options = _parser().parse_args()
    document = {
        "date": time.strftime("%Y-%m-%d"),
        "label": options.label,
        "server": " ".join(options.base_url),
        "loads": [],
    }
    print(HEADER, flush=True)
    for row in _rows(options):
        document["loads"].append(row)
        if options.output:
            options.output.write_text(json.dumps(document, indent=1) + "\n")


def _rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The figures of each load, printed as they come: one server after the other, then the next load."""
    loads = [("concurrency", number) for number in options.concurrency]
    loads += [("rate", number) for number in options.rate]
    for seed in range(options.seed, options.seed + options.rounds):
        for kind, number in loads:
            asked = workload(argparse.Namespace(**{**vars(options), "seed": seed}), kind, number)
            for base_url in options.base_url:
                answered, seconds = run(options, base_url, kind, number, asked)
                row = {kind: number} | summary(answered, seconds, options.slo_first, options.slo_between)
                several = len(options.base_url) > 1
                print(line(kind, number, row) + (f"  {base_url}" if several else ""), flush=True)
                yield {"server": base_url, "seed": seed} | row


def _parser() -> argparse.ArgumentParser:
    parser = request_options(__doc__)
    parser.add_argument("--base-url", nargs="+", default=["http://127.0.0.1:8000/v1"])
    parser.add_argument("--rounds", type=int, default=1, help="times that all of it is done")
    parser.add_argument("--model", help="the name to ask by; the server's first if not given")
    parser.add_argument("--api-key", default="none")
    parser.add_argument(
        "--rate", type=float, nargs="*", default=[], help="open loop: Poisson, so many a second"
    )
    parser.add_argument("--processes", type=int, default=1, help="clients that share the load")
    parser.add_argument("--timing", action="store_true", help="ask what each phase took; Lamina tells")
    return parser


if __name__ == "__main__":
    main()
