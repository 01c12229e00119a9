"""A load asked of a server over HTTP: by how many clients, each answer as it came."""

import argparse
import asyncio
import json
import multiprocessing
import time
from functools import partial

import event_client
from event_client import Server
from loads import Answered, Asked


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
    return event_client.run(_ask_all(options, base_url, asked, at_once))


async def _ask_all(
    options: argparse.Namespace, base_url: str, asked: list[Asked], at_once: int | None
) -> tuple[list[Answered], float, float]:
    server = Server(base_url, options.api_key)
    model = options.model or str((await server.get("/models"))["data"][0]["id"])
    slots = asyncio.Semaphore(at_once or len(asked))
    begun = time.monotonic()

    async def ask(one: Asked) -> Answered:
        if at_once is None:
            await asyncio.sleep(begun + one.at - time.monotonic())
        async with slots:
            return await _ask(server, model, one, timing=options.timing)

    answers = await asyncio.gather(*map(ask, asked))
    ended = time.monotonic()
    server.close()
    return list(answers), begun, ended


async def _ask(server: Server, model: str, one: Asked, *, timing: bool) -> Answered:
    body = {
        "model": model,
        "prompt": one.prompt,
        "max_tokens": one.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True} | ({"include_timing": True} if timing else {}),
    }
    answer, begun = Answered(), time.monotonic()
    try:
        async with server.connection() as connection:
            request = server.post("/completions", body)
            begun = time.monotonic()
            status, text = await connection.ask(request, partial(_note, answer, begun))
            if status != 200:
                answer.error = f"{status}: {text[:200].decode(errors='replace')}"
    except (OSError, TimeoutError) as error:
        answer.error = repr(error)
    answer.seconds = time.monotonic() - begun
    if answer.error is None and not (answer.arrivals and answer.num_tokens):
        answer.error = "the stream had no text, or no usage"
    return answer


def _note(answer: Answered, begun: float, data: bytes, now: float) -> None:
    """Note when a piece of text arrives, and how many tokens the server counted."""
    event = json.loads(data)
    if event.get("error"):
        answer.error = str(event["error"])[:200]
    if any(choice.get("text") or choice.get("token_ids") for choice in event.get("choices", ())):
        answer.arrivals.append(now - begun)
    if event.get("usage"):
        answer.num_tokens = event["usage"]["completion_tokens"]
        answer.phases = event.get("timing", {})
