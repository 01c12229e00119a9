"""The body of a stream for who has only ASGI's send(): in order, and full while nothing is taken."""

import asyncio
from typing import Any

from lamina.serving.response_body import SentBody


class Client:
    """Takes a message when it is let."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self.may_take = asyncio.Event()

    async def send(self, message: Any) -> None:
        await self.may_take.wait()
        self.taken.append(message)

    @property
    def text(self) -> bytes:
        return b"".join(message["body"] for message in self.taken)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_what_is_written_arrives_in_order_and_then_the_end() -> None:
    async def body() -> None:
        client = Client()
        sent = SentBody(client.send)
        pieces = [b"%d " % number for number in range(50)]
        for number, piece in enumerate(pieces):
            sent.write(piece)
            if number == 20:
                client.may_take.set()
            if number % 7 == 0:
                await settle()
        await sent.end(b"end")
        assert client.text == b"".join(pieces) + b"end"
        assert [message["more_body"] for message in client.taken[:-1]] == [True] * (len(client.taken) - 1)
        assert not client.taken[-1]["more_body"]

    asyncio.run(body())


def test_a_client_that_takes_nothing_is_full_until_it_does() -> None:
    async def body() -> None:
        client, calls = Client(), []
        sent = SentBody(client.send)
        sent.on_writable = lambda: calls.append(sent.is_full)
        sent.write(b"x")
        await settle()
        assert not sent.is_full
        sent.write(b"y" * SentBody.MOST_HELD)
        assert sent.is_full
        await settle()
        assert not calls
        client.may_take.set()
        await settle()
        assert calls == [False]
        assert client.text == b"x" + b"y" * SentBody.MOST_HELD

    asyncio.run(body())


def test_nothing_follows_an_abort() -> None:
    async def body() -> None:
        client = Client()
        sent = SentBody(client.send)
        sent.write(b"x")
        await settle()
        sent.write(b"y")
        sent.abort()
        client.may_take.set()
        await settle()
        assert not client.taken

    asyncio.run(body())
