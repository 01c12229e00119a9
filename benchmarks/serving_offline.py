"""What serving.py asks of a server, asked of a Runtime in this process: the same prompts, so many at a time.

A runtime for each concurrency, which computes no more than that at once. A concurrency of 1 is streamed, one
request after another, for its time to the first token, by a runtime like the server's, which computes up to
--max-num-seqs; others are one call of generate().
--http: a server with the same settings is asked, too, by turns with the runtime, which has half of the memory
then. Of a concurrency of 1 it prints what HTTP adds to the time to the first token, and where: until the
engine has the request, in the engine, and the rest, which is the way back and the client.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from http_loads import run
from loads import HEADER, Answered, Asked, line, request_options, summary, workload

from lamina import Runtime, SamplingParams

FEWEST_TO_WARM = 8  # requests


def main() -> None:
    """Print a line a concurrency, and write JSON where --output says."""
    options = _parser().parse_args()
    document = {"date": time.strftime("%Y-%m-%d"), "label": options.label, "model": str(options.folder)}
    rows: list[dict[str, Any]] = []
    print(HEADER, flush=True)
    for concurrency in options.concurrency:
        settings = _settings(options, concurrency)
        server = _served(options.folder, settings) if options.http else nullcontext()
        own = {"memory_fraction": options.memory_fraction / 2} if options.http else {}
        with Runtime.from_pretrained(options.folder, **settings | own) as runtime, server as base_url:
            for row in _measured(options, concurrency, runtime, base_url):
                rows.append(row)
                if options.output:
                    options.output.write_text(json.dumps(document | {"loads": rows}, indent=1) + "\n")
    if options.http and 1 in options.concurrency:
        print(_difference([row for row in rows if row["concurrency"] == 1]))


def _parser() -> argparse.ArgumentParser:
    parser = request_options(__doc__)
    parser.add_argument("folder", type=Path, help="as made_up_model.py writes it")
    parser.add_argument("--http", action="store_true", help="ask a server by turns with the runtime")
    parser.add_argument("--rounds", type=int, default=1, help="times that each is asked, by other prompts")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="where requests are streamed")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--memory-fraction", type=float, default=0.85)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cache-dir")
    return parser


def _settings(options: argparse.Namespace, concurrency: int) -> dict[str, Any]:
    return {
        "load_format": "dummy",
        "device": options.device,
        "max_num_seqs": options.max_num_seqs if concurrency == 1 else concurrency,
        "max_model_len": options.max_model_len,
        "memory_fraction": options.memory_fraction,
        "cache_dir": options.cache_dir,
    }


@contextmanager
def _served(folder: Path, settings: dict[str, Any]) -> Iterator[str]:
    """Yields the base URL of a server that is ready."""
    command = [sys.executable, "-m", "lamina", "serve", str(folder), "--port", "0"]
    for name, value in settings.items():
        command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = next((line for line in process.stdout if "serving" in line), None)
            if said is None:
                raise SystemExit("the server has ended")
            yield f"{said.split()[-1]}/v1"
        finally:
            process.terminate()


def _measured(
    options: argparse.Namespace, concurrency: int, runtime: Runtime, base_url: str | None
) -> Iterator[dict[str, Any]]:
    """The figures of each round, printed as they come, of the runtime and of the server if any."""
    for seed in (-2, -1, *range(options.rounds)):  # kernels and graphs are there after the first two
        own = argparse.Namespace(**{**vars(options), "seed": options.seed + seed})
        if seed < 0:
            own.requests = max(concurrency, FEWEST_TO_WARM)
        asked = workload(own, "concurrency", concurrency)
        for url in (None, base_url) if base_url else (None,):
            answered, seconds = _asked_of(options, concurrency, asked, runtime, url)
            if seed < 0:
                continue
            row = summary(answered, seconds, options.slo_first, options.slo_between)
            print(line("concurrency", concurrency, row) + ("  over HTTP" if url else ""), flush=True)
            yield {"concurrency": concurrency, "seed": own.seed, "http": bool(url)} | row


def _asked_of(
    options: argparse.Namespace, concurrency: int, asked: list[Asked], runtime: Runtime, url: str | None
) -> tuple[list[Answered], float]:
    if url is None:
        return _answer(runtime, concurrency, asked)
    own = {"model": None, "api_key": "none", "timing": True, "processes": min(concurrency, 8)}
    return run(argparse.Namespace(**own), url, "concurrency", concurrency, asked)


def _answer(runtime: Runtime, concurrency: int, asked: Sequence[Asked]) -> tuple[list[Answered], float]:
    params = [SamplingParams(max_tokens=one.max_tokens, temperature=0.0, ignore_eos=True) for one in asked]
    started = time.monotonic()
    if concurrency == 1:
        answered = [_streamed(runtime, one, own) for one, own in zip(asked, params, strict=True)]
        return answered, time.monotonic() - started
    outputs = runtime.generate([one.prompt for one in asked], params)
    seconds = time.monotonic() - started
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    return [Answered(arrivals=[seconds], num_tokens=length, seconds=seconds) for length in lengths], seconds


def _streamed(runtime: Runtime, one: Asked, params: SamplingParams) -> Answered:
    answer, begun = Answered(), time.monotonic()
    for delta in runtime.stream(one.prompt, params):
        answer.arrivals.append(time.monotonic() - begun)
        answer.num_tokens += len(delta.token_ids)
    answer.seconds = time.monotonic() - begun
    return answer


def _difference(rows: Sequence[dict[str, Any]]) -> str:
    """What HTTP adds to the time to the first token, by medians of all rounds, and where the time is."""
    http = [row for row in rows if row["http"]]
    offline = statistics.median(row["first_token_ms"]["p50"] for row in rows if not row["http"])
    names = ("first_token_ms", "receive_ms", "queue_ms", "prefill_ms")
    first, receive, queue, prefill = (statistics.median(row[name]["p50"] for row in http) for name in names)
    return (
        f"first token: {offline:.2f} ms offline, {first:.2f} over HTTP, which adds {first - offline:.2f}; "
        f"of these {receive:.2f} until the engine has it, {queue + prefill:.2f} in the engine, "
        f"{first - receive - queue - prefill:.2f} the rest"
    )


if __name__ == "__main__":
    main()
