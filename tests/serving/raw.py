"""Clients that speak HTTP byte by byte, to say what no well-behaved client would."""

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(kw_only=True, slots=True)
class Answer:
    """One answer as it came over the wire."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error in OpenAI's shape; fails for an answer that has none."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["type"]
        return error


class RawClient:
    """A connection: what is sent is bytes, what is read is answers in their order."""

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout=timeout)
        self.file = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.socket.sendall(data)

    def read(self, *, has_body: bool = True) -> Answer:
        """Read the next answer, chunked or not."""
        status = int(self.file.readline().split()[1])
        headers = {}
        while line := self.file.readline().strip():
            name, _, value = line.decode().partition(": ")
            headers[name.lower()] = value
        return Answer(status=status, headers=headers, body=self._body(headers) if has_body else b"")

    def is_closed(self) -> bool:
        """Wait for the server to close the connection; what it still sends fails the test."""
        with contextlib.suppress(ConnectionResetError):
            assert self.file.read() == b""
        return True

    def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return self.file.read(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            return self.file.read()
        body = b""
        while size := int(self.file.readline(), 16):
            body += self.file.read(size)
            self.file.readline()
        self.file.readline()
        return body


@contextlib.contextmanager
def raw_client(url: str) -> Iterator[RawClient]:
    """A connection for the block."""
    client = RawClient(url)
    try:
        yield client
    finally:
        client.file.close()
        client.socket.close()


def post(path: str, body: bytes, *headers: str, version: str = "1.1") -> bytes:
    """The bytes of a request with a JSON body."""
    lines = [
        f"POST {path} HTTP/{version}",
        "host: test",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
