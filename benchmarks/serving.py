"""A server under load, whichever OpenAI-compatible one it is: closed loop by concurrency, open loop by rate.

Every request is a prompt of token ids to /v1/completions, so servers of the same model are asked the same:
of several --base-url each is asked every load in turn, by other prompts in each of --rounds.
It prints a line a load and writes JSON: output tokens/s, time to first token, time between tokens, and the
goodput, requests/s of which the first token and the mean time between tokens kept within the limits given.
"""

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
from loads import HEADER, Answered, Asked, line, request_options, summary, workload

LIMIT = aiohttp.ClientTimeout(total=None, sock_connect=60, sock_read=600)


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
    return parser


def run(
    options: argparse.Namespace, base_url: str, kind: str, number: float, asked: list[Asked]
) -> tuple[list[Answered], float]:
    """Every answer, and the seconds from the first request to the end of the last answer."""
    closed = kind == "concurrency"
    processes = min(options.processes, int(number)) if closed else options.processes
    jobs = [
        (options, base_url, share, len(range(index, int(number), processes)) if closed else None)
        for index in range(processes)
        if (share := asked[index::processes])
    ]
    if len(jobs) == 1:
        found = [_client(*jobs[0])]
    else:
        with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
            found = pool.starmap(_client, jobs)
    begun, ended = min(each[1] for each in found), max(each[2] for each in found)
    return [answer for answers, _, _ in found for answer in answers], ended - begun


def _client(
    options: argparse.Namespace, base_url: str, asked: list[Asked], at_once: int | None
) -> tuple[list[Answered], float, float]:
    return asyncio.run(_ask_all(options, base_url, asked, at_once))


async def _ask_all(
    options: argparse.Namespace, base_url: str, asked: list[Asked], at_once: int | None
) -> tuple[list[Answered], float, float]:
    headers = {"Authorization": f"Bearer {options.api_key}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=LIMIT) as session:
        model = options.model or await _first_model(session, base_url)
        slots = asyncio.Semaphore(at_once or len(asked))
        begun = time.monotonic()

        async def ask(one: Asked) -> Answered:
            if at_once is None:
                await asyncio.sleep(begun + one.at - time.monotonic())
            async with slots:
                return await _ask(session, f"{base_url}/completions", model, one)

        answers = await asyncio.gather(*map(ask, asked))
        return list(answers), begun, time.monotonic()


async def _first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    async with session.get(f"{base_url}/models") as response:
        response.raise_for_status()
        return str((await response.json())["data"][0]["id"])


async def _ask(session: aiohttp.ClientSession, url: str, model: str, one: Asked) -> Answered:
    body = {
        "model": model,
        "prompt": one.prompt,
        "max_tokens": one.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer, begun = Answered(), time.monotonic()
    try:
        async with session.post(url, json=body) as response:
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


if __name__ == "__main__":
    main()
