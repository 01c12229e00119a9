"""Clients that break off, lie, wait, never read, or ask for nonsense, each in a way drawn by chance."""

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

BODIES = (
    b"",
    b"{",
    b"null",
    b"[]",
    b"\xff\xfe",
    b'{"prompt": 5}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "n": 1000000000}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": [-1]}',
    b'{"prompt": [999999]}',
    b'{"prompt": "a", "model": "\\ud800"}',
    b'{"messages": [{}]}',
    b'{"messages": "x", "stream": "yes"}',
    b'{"input": [{"type": "item_reference"}], "store": 1}',
    b'{"input": "a", "previous_response_id": "resp_of_nobody"}',
    b'{"prompt": "a", "logit_bias": {"abc": 1}}',
    b"[" * 20_000,
    json.dumps({"prompt": "a " * 4000}).encode(),
)
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages")


class Attack:
    """Many clients of one server at once; `statuses` counts what they were answered."""

    def __init__(self, url: str, secrets: list[str], *, seed: int) -> None:
        address = urlsplit(url)
        self.host, self.port = str(address.hostname), address.port
        self.secrets, self.draw = secrets, random.Random(seed)
        self.statuses: Counter[int] = Counter()
        self.ways: Counter[str] = Counter()

    async def run(self, num_requests: int, at_once: int) -> None:
        """Returns when all requests are done with, as far as their clients care."""
        left = iter(range(num_requests))

        async def client() -> None:
            for _ in left:
                way = self.draw.choices(WAYS, WEIGHTS)[0]
                self.ways[way.__name__] += 1
                await asyncio.wait_for(way(self), 60)

        await asyncio.gather(*(client() for _ in range(at_once)))

    # What they do.

    async def well_behaved(self) -> None:
        await self._ask(self._body(), read=self._whole)

    async def goes_before_the_answer(self) -> None:
        await self._ask(self._body(), read=self._for_a_moment)

    async def goes_in_the_middle_of_a_stream(self) -> None:
        await self._ask(self._body(stream=True, max_tokens=60), read=self._first_bytes)

    async def sends_nonsense(self) -> None:
        await self._ask(self.draw.choice(BODIES), read=self._whole)

    async def sends_noise(self) -> None:
        await self._ask(self.draw.randbytes(self.draw.randrange(200)), read=self._whole)

    async def sends_half_a_body(self) -> None:
        body = self._body()
        await self._ask(body[: len(body) // 2], length=len(body), read=self._for_a_moment)

    async def sends_half_a_body_and_waits(self) -> None:
        body = self._body()
        await self._ask(body[:-1], length=len(body), read=self._whole)

    async def sends_half_a_head(self) -> None:
        await self._send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Api", read=self._for_a_moment)

    async def sends_no_http(self) -> None:
        await self._send(self.draw.randbytes(100) + b"\r\n\r\n", read=self._whole)

    async def stops_sending_and_reads(self) -> None:
        async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write_eof()
            await self._whole(reader, writer)

        await self._ask(self._body(), read=read)

    async def asks_twice_and_goes(self) -> None:
        body = self._body()
        await self._send(self._request(body) * 2, read=self._first_bytes)

    async def leaves_responses(self) -> None:
        asked = {"input": "a", "store": self.draw.random() < 0.5, "stream": self.draw.random() < 0.7}
        body = json.dumps({**asked, "max_output_tokens": self.draw.randrange(1, 60)}).encode()
        read = self.draw.choice((self._whole, self._first_bytes, self._for_a_moment))
        await self._ask(body, read=read, path="/v1/responses")

    async def has_no_key(self) -> None:
        await self._ask(self._body(), read=self._whole, secret=self.draw.choice(("", "wrong")))

    async def gives_little_time(self) -> None:
        seconds = self.draw.choice(("0.001", "0.01", "0.1", "nan"))
        await self._ask(self._body(max_tokens=60), read=self._whole, **{"x-request-timeout": seconds})

    async def looks_for_what_is_not_there(self) -> None:
        path = f"/{self.draw.randrange(10**9)}/v1"
        await self._ask(self._body(model=str(self.draw.random())), read=self._whole, path=path)

    async def asks_for_another_model(self) -> None:
        await self._ask(self._body(model=str(self.draw.random())), read=self._whole)

    async def aborts(self) -> None:
        name, secret = f"mine-{self.draw.randrange(10**9)}", self.draw.choice(self.secrets)
        named = {"secret": secret, "X-Request-Id": name}
        asked = asyncio.ensure_future(self._ask(self._body(max_tokens=60), read=self._whole, **named))
        await asyncio.sleep(self.draw.random() * 0.05)
        await self._ask(b"", read=self._whole, path=f"/v1/requests/{name}/abort", secret=secret)
        await asked

    async def never_reads(self) -> None:
        # Far more than the sockets hold: the server itself has to hang up.
        body = self._body(stream=True, max_tokens=100, n=8, logprobs=20, ignore_eos=True)
        await self._ask(body, read=self._nothing)

    # How they read.

    async def _whole(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._count(await reader.read(1 << 20))
        while await reader.read(1 << 20):
            pass

    async def _first_bytes(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._count(await reader.read(self.draw.choice((1, 20, 2000))))

    async def _for_a_moment(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self.draw.choice((0, 0.001, 0.01, 0.05)))

    async def _nothing(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(2.5)

    # The wire.

    def _body(self, **fields: Any) -> bytes:
        draw = self.draw
        given = {
            "model": "tiny",
            "prompt": [[draw.randrange(4, 300) for _ in range(draw.randrange(1, 40))]]
            * draw.choice((1, 1, 3)),
            "messages": [{"role": "user", "content": "a" * draw.randrange(20)}],
            "max_tokens": draw.randrange(1, 24),
            "n": draw.choice((1, 1, 1, 2)),
            "stream": draw.random() < 0.5,
            "priority": draw.randrange(3),
            "user": str(draw.random()),
        }
        return json.dumps({**given, **fields}).encode()

    def _request(self, body: bytes, *, length: int | None = None, path: str = "", **headers: str) -> bytes:
        secret = headers.pop("secret", self.draw.choice(self.secrets))
        path = path or self.draw.choice(PATHS)
        given = {"Host": "x", "Authorization": f"Bearer {secret}", "Connection": "close", **headers}
        given["Content-Length"] = str(len(body) if length is None else length)
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body

    async def _ask(self, body: bytes, *, read: "Reading", **more: Any) -> None:
        await self._send(self._request(body, **more), read=read)

    async def _send(self, data: bytes, *, read: "Reading") -> None:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(data)
            await writer.drain()
            await read(reader, writer)
        except ConnectionError:
            self.statuses[0] += 1
        finally:
            if self.draw.random() < 0.5:  # by a reset, not a farewell
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.close()

    def _count(self, data: bytes) -> None:
        words = data.split(b" ", 2)
        self.statuses[int(words[1]) if len(words) == 3 and words[1].isdigit() else 0] += 1


Reading = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WAYS = [
    way
    for name, way in vars(Attack).items()
    if not name.startswith("_") and name not in ("run",) and callable(way)
]
WEIGHTS = [{"well_behaved": 5, "never_reads": 0.3}.get(way.__name__, 1) for way in WAYS]
