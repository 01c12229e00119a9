"""Servers of models whose answers are given, and connections that behave as no client of HTTP does."""

import json
import socket

import pytest

from ..reading import COMPLETIONS


class Raw:
    """A connection that has sent one request, read byte by byte or not at all."""

    def __init__(self, server, path=COMPLETIONS, receive_buffer=None, **body):
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(60)
        self.socket.connect((host, int(port)))
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self.socket.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)

    def read(self, size):
        """So many bytes, or what there is up to the end."""
        data = b""
        while len(data) < size and (more := self.socket.recv(size - len(data))):
            data += more
        return data

    def rest(self):
        """What comes until the server closes or resets the connection."""
        try:
            return self.read(2**30)
        except ConnectionResetError:
            return b""

    def close(self, reset=False):
        """End the connection, by a reset if so."""
        if reset:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.socket.close()


@pytest.fixture
def raw():
    """raw(server, path, **body) -> a connection that has sent the request, closed after the test."""
    opened = []

    def make(*args, **kwargs):
        opened.append(Raw(*args, **kwargs))
        return opened[-1]

    yield make
    for connection in opened:
        connection.close()
