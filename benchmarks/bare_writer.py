"""What sockets alone cost: `python bare_writer.py TOKENS_A_SECOND STREAMS` writes the same bytes to as many.

It reads no request but for its length, makes no text and knows no engine: once so many streams are asked for,
each gets the same event at that pace, by one write a token.
"""

import asyncio
import json
import sys
import time
from typing import cast

import uvloop

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n"
CHOICE = '{"index":0,"text":" ab","logprobs":null,"finish_reason":null}'
FIELDS = '"object":"text_completion","created":1795978016,"model":"made-up","system_fingerprint":"lamina-0.1"'
EVENT = f'data: {{"id":"cmpl-{"0" * 32}",{FIELDS},"choices":[{CHOICE}]}}\n\n'.encode()
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
USAGE = 'data: {{"choices":[],"usage":{{"completion_tokens":{},"prompt_tokens_details":{{}}}}}}\n\n'
LAST = USAGE + "data: [DONE]\n\n"


class Stream(asyncio.Protocol):
    """One client; it joins the others once its request is whole."""

    def __init__(self, rate: float, num_streams: int, waiting: "list[Stream]") -> None:
        self.rate, self.num_streams, self.waiting = rate, num_streams, waiting
        self.data, self.num_tokens = b"", 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Its request is to come."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Read the request's length, and begin with all others when the last has come."""
        self.data += data
        head, _, body = self.data.partition(b"\r\n\r\n")
        if not body or len(body) < int(head.lower().partition(b"content-length:")[2].split()[0]):
            return
        self.num_tokens = json.loads(body)["max_tokens"]
        self.transport.write(HEAD)
        self.waiting.append(self)
        if len(self.waiting) == self.num_streams:
            self.writing = asyncio.ensure_future(write_all(self.rate, [*self.waiting]))
            self.waiting.clear()


async def write_all(rate: float, streams: list[Stream]) -> None:
    """Write an event a token to each, a step at a time."""
    due, num_tokens = time.monotonic(), streams[0].num_tokens
    for _ in range(num_tokens):
        due = max(due + len(streams) / rate, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        for stream in streams:
            stream.transport.write(CHUNK)
    for stream in streams:
        stream.transport.write(LAST.format(num_tokens).encode())
        stream.transport.close()


async def main() -> None:
    """Listen until ended."""
    rate, num_streams = float(sys.argv[1]), int(sys.argv[2])
    waiting: list[Stream] = []
    server = await asyncio.get_running_loop().create_server(
        lambda: Stream(rate, num_streams, waiting), "127.0.0.1", 0
    )
    print(f"serving at http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
