"""The body of a stream on a connection: what begins a response leaves in one piece."""

import asyncio
import logging
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from lamina.serving.response_body import ResponseBody

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


class Transport:
    """Keeps each piece that is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


def begun_with(client: Transport) -> RequestResponseCycle:
    """A response that nothing has been sent of."""
    logger = logging.getLogger("test")
    transport: Any = client
    return RequestResponseCycle(
        scope={"type": "http", "method": "POST", "http_version": "1.1"},
        transport=transport,
        flow=FlowControl(transport),
        logger=logger,
        access_logger=logger,
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=True,
        on_response=lambda: None,
    )


def test_the_head_leaves_with_the_first_event_and_others_as_they_come() -> None:
    client = Transport()
    cycle = begun_with(client)
    body = ResponseBody(cycle)
    body.begin(lambda: cycle.send(START), b"data: 1\n\n")
    body.write(b"data: 2\n\n")
    asyncio.run(body.end(b"data: 3\n\n"))
    first, *others = client.written
    head, _, chunk = first.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
    assert chunk == b"9\r\ndata: 1\n\n\r\n"
    assert others == [b"9\r\ndata: 2\n\n\r\n", b"9\r\ndata: 3\n\n\r\n0\r\n\r\n"]


def test_a_client_that_has_gone_is_sent_nothing() -> None:
    client = Transport()
    cycle = begun_with(client)
    cycle.disconnected = True
    ResponseBody(cycle).begin(lambda: cycle.send(START), b"data: 1\n\n")
    assert not client.written


def test_what_fails_as_the_head_is_made_leaves_the_connection_to_its_error() -> None:
    async def waits() -> None:
        await asyncio.sleep(0)

    client = Transport()
    cycle = begun_with(client)
    with pytest.raises(RuntimeError, match="waits"):
        ResponseBody(cycle).begin(waits, b"data: 1\n\n")
    asyncio.run(cycle.send({**START, "status": 500}))
    assert client.written[0].startswith(b"HTTP/1.1 500 ")
