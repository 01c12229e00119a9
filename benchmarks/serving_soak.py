"""A server for half an hour under clients of every kind: what does it hold at the end that it did not before?

Requests are whole, streamed, in a given form, with tools, aborted, broken off, out of time, read slowly or
nonsense. From time to time all clients rest until the server is idle, and what its processes hold then is
noted: memory, files, threads, blocks of the KV cache, series of metrics. It fails where a figure has grown.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from lamina.cli.info import describe_machine

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "serving_soak.json"
DEMO_MODEL = HERE.parent / "cache_dir" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
OPTIONS = ["--max-num-seqs", "16", "--num-kv-blocks", "192", "--max-model-len", "1024", "--max-waiting", "64"]
OPTIONS += ["--max-unsent-bytes", "65536", "--send-timeout", "5", "--keep-alive-timeout", "5"]
OPTIONS += ["--max-stored-bytes", "200000", "--swap-bytes", str(16 << 20)]
EXPECTED = {200, 400, 404, 408, 413, 415, 429, 499}
GROWTH = 1.03  # of the memory of a process from half of the time to its end, at most
POOL = 6  # threads of a pool, which come as they are needed
TEXT = "the of a river mountain why does it rain tell me about two cats and seven ships that never left port"
WORDS = TEXT.split()
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note_person", "description": "Note.", "parameters": SCHEMA}}


def main() -> None:
    """Print what is held each time the server rests, write JSON, and fail where something was kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=DEMO_MODEL)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rests", type=int, default=15, help="times that the server comes to rest")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options, more = parser.parse_known_args()  # what it does not know is for the server
    machine = {name: describe_machine()[name] for name in ("cpu", "cores", "python", "versions")}
    with served(options.model, more) as (process, url):
        clients = Clients(url)
        held = asyncio.run(soak(clients, process.pid, options))
    document = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "minutes": options.minutes}
    document |= {
        "ways": dict(sorted(clients.ways.items())),
        "statuses": dict(sorted(clients.statuses.items())),
    }
    document |= {"ends": dict(sorted(clients.ends.items())), "held": held, "exit_code": process.returncode}
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    if faults := kept(held) + sorted(f"status {s}" for s in clients.statuses if s not in EXPECTED):
        raise SystemExit(f"something is wrong: {faults}")


@contextmanager
def served(model: Path, more: list[str]) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Yields the process of a server that is ready, and its address; the server drains at the end."""
    command = [sys.executable, "-m", "lamina", "serve", str(model), "--port", "0", *OPTIONS, *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        try:
            yield process, next(line for line in process.stdout if "serving" in line).split()[-1]
        finally:
            process.terminate()
            process.wait(60)


def kept(held: list[dict[str, Any]]) -> list[str]:
    """What has grown from half of the time to the end, in words."""
    begin, end = held[len(held) // 2], held[-1]
    same = ("processes", "blocks", "requests", "series")
    grown = [f"{name}: {begin[name]} became {end[name]}" for name in same if end[name] > begin[name]]
    for name, more in (("files", 1), ("threads", POOL)):  # a connection that is about to end is a file
        pairs = zip(begin[name], end[name], strict=True)
        grown += [f"{name}: {before} became {after}" for before, after in pairs if after > before + more]
    pairs = zip(begin["resident_mib"], end["resident_mib"], strict=True)
    return grown + [f"memory: {a} MiB became {b}" for a, b in pairs if b > GROWTH * a]


async def soak(clients: "Clients", pid: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What was held at every rest."""
    held, begun = [], time.monotonic()
    for rest in range(1, options.rests + 1):
        until = begun + options.minutes * 60 * rest / options.rests
        await asyncio.gather(*(clients.go_on(until) for _ in range(options.clients)))
        held.append({"seconds": round(time.monotonic() - begun), "asked": clients.ways.total()})
        held[-1] |= await clients.come_to_rest() | of_processes(pid)
        print(json.dumps(held[-1]), flush=True)
    return held


def of_processes(pid: int) -> dict[str, Any]:
    """Resident memory of the server and of its engine, and the files and threads of both."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    folders = [Path("/proc") / name for name in (str(pid), *children)]
    sizes = [re.search(r"VmRSS:\s+(\d+)", (each / "status").read_text()) for each in folders]
    return {
        "resident_mib": [round(int(size[1]) / 1024, 1) for size in sizes if size],
        "files": [len(list((each / "fd").iterdir())) for each in folders],
        "threads": [len(list((each / "task").iterdir())) for each in folders],
        "processes": len(folders),
    }


class Clients:
    """Everybody who asks one server; each request is of a kind drawn by chance."""

    def __init__(self, url: str) -> None:
        self.url, self.draw = url, random.Random(0)
        self.ways: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.ends: Counter[str] = Counter()

    async def go_on(self, until: float) -> None:
        """One client asks until then, each time by a connection of its own or by the one it has."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
            while time.monotonic() < until:
                way = self.draw.choice(WAYS)
                self.ways[way.__name__.removeprefix("_")] += 1
                try:
                    await way(self, session)
                except (aiohttp.ClientError, TimeoutError) as error:
                    self.ends[type(error).__name__] += 1

    async def come_to_rest(self) -> dict[str, Any]:
        """Wait until nothing is computed, and connections have ended; what the metrics say then."""
        await asyncio.sleep(8)
        async with aiohttp.ClientSession() as session:
            for _ in range(240):
                async with session.get(f"{self.url}/metrics") as response:
                    page = await response.text()
                figures = dict(re.findall(r"^lamina:(\S+?){\S*} (\S+)$", page, re.MULTILINE))
                requests = float(figures["num_requests_running"]) + float(figures["num_requests_waiting"])
                if not requests:
                    break
                await asyncio.sleep(0.5)
        used = re.search(r'kv_cache_blocks{[^}]*state="used"} (\S+)', page)
        assert used
        series = sum(not line.startswith("#") for line in page.splitlines())
        return {"requests": requests, "blocks": float(used[1]), "series": series}

    # What they ask.

    async def _whole(self, session: aiohttp.ClientSession) -> None:
        await self._ask(session, "completions", prompt=self._text(), n=self.draw.choice((1, 3)), logprobs=2)

    async def _streamed(self, session: aiohttp.ClientSession) -> None:
        await self._ask(session, "chat/completions", messages=self._messages(), stream=True)

    async def _message(self, session: aiohttp.ClientSession) -> None:
        await self._ask(session, "messages", messages=self._messages(), stream=self.draw.random() < 0.5)

    async def _response(self, session: aiohttp.ClientSession) -> None:
        stream = self.draw.random() < 0.5
        await self._ask(session, "responses", input=self._text(), stream=stream, max_output_tokens=16)

    async def _in_a_form(self, session: aiohttp.ClientSession) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        asked = {"messages": self._messages(), "response_format": form, "stream": self.draw.random() < 0.5}
        await self._ask(session, "chat/completions", **asked)

    async def _with_tools(self, session: aiohttp.ClientSession) -> None:
        asked = {"messages": self._messages(), "tools": [TOOL], "stream": self.draw.random() < 0.5}
        await self._ask(
            session, "chat/completions", tool_choice=self.draw.choice(("auto", "required")), **asked
        )

    async def _broken_off(self, session: aiohttp.ClientSession) -> None:
        num_pieces = self.draw.randrange(4)
        await self._ask(session, "completions", num_pieces, prompt=self._text(), stream=True, max_tokens=200)

    async def _out_of_time(self, session: aiohttp.ClientSession) -> None:
        headers = {"x-request-timeout": self.draw.choice(("0.05", "0.5"))}
        await self._ask(session, "completions", headers=headers, prompt=self._text(), max_tokens=200)

    async def _aborted(self, session: aiohttp.ClientSession) -> None:
        name = f"mine-{self.draw.randrange(10**9)}"
        asked = {"prompt": self._text(), "max_tokens": 200, "headers": {"X-Request-Id": name}}
        asking = asyncio.ensure_future(self._ask(session, "completions", **asked))
        await asyncio.sleep(self.draw.random())
        async with session.post(f"{self.url}/v1/requests/{name}/abort") as response:
            self.statuses[response.status] += 1
        await asking

    async def _read_slowly(self, session: aiohttp.ClientSession) -> None:
        await self._ask(session, "completions", pause=0.3, prompt=self._text(), stream=True, max_tokens=24)

    async def _nonsense(self, session: aiohttp.ClientSession) -> None:
        wrong = {"n": -1, "temperature": "hot", "max_tokens": 10**9, "stop": [""] * 999, "prompt": [10**9]}
        name = self.draw.choice(list(wrong))
        await self._ask(session, "completions", **{"prompt": "a", name: wrong[name]})

    async def _noise(self, session: aiohttp.ClientSession) -> None:
        data = self.draw.choice((b"", b"{", self.draw.randbytes(100), b"[" * 9999))
        kind = {"Content-Type": self.draw.choice(("application/json", "text/plain"))}
        async with session.post(f"{self.url}/v1/completions", data=data, headers=kind) as response:
            self.statuses[response.status] += 1

    # How.

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        path: str,
        num_pieces: int | None = None,
        pause: float = 0.0,
        headers: dict[str, str] | None = None,
        **body: Any,
    ) -> None:
        """Ask, and read so many pieces of the answer, all unless told, with a pause after each."""
        if path != "responses":
            body = {"max_tokens": 16, **body}
        async with session.post(f"{self.url}/v1/{path}", json=body, headers=headers) as response:
            self.statuses[response.status] += 1
            count = 0
            async for piece in response.content.iter_any():
                count += 1
                if b'"error"' in piece and response.status == 200:
                    self.ends["error event"] += 1
                if num_pieces is not None and count > num_pieces:
                    response.close()
                    return
                await asyncio.sleep(pause)

    def _text(self) -> str:
        return " ".join(self.draw.choices(WORDS, k=self.draw.randrange(3, 60)))

    def _messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self._text()}]


WAYS: list[Callable[[Clients, aiohttp.ClientSession], Awaitable[None]]] = [
    Clients._whole,
    Clients._streamed,
    Clients._streamed,
    Clients._message,
    Clients._response,
    Clients._in_a_form,
    Clients._with_tools,
    Clients._broken_off,
    Clients._out_of_time,
    Clients._aborted,
    Clients._read_slowly,
    Clients._nonsense,
    Clients._noise,
]

if __name__ == "__main__":
    main()
