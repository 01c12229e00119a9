"""The socket between the process of a core and the one that serves: whole frames, no thread in between."""

import select
import socket
import struct
import threading
import time
from contextlib import suppress

HEARTBEAT_SECONDS = 0.5  # between two that a core sends: it lives
LENGTH = struct.Struct("<Q")  # of a frame, before it
MOST_READ = 1 << 16  # bytes at once
AT_ONCE = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)  # no signal where nobody is there


class CoreSocket:
    """One end. Any thread sends; one receives, and only it.

    Mostly a frame costs one call of the system on either side, and wakes nobody but who receives it. What the
    other end does not take yet is kept, and a thread sends it on.
    """

    def __init__(self, connection: socket.socket) -> None:
        """connection: of a stream, which is this object's own from now on."""
        connection.setblocking(True)  # to wait for a frame takes one call then
        self._connection = connection
        self._room = memoryview(bytearray(MOST_READ))
        self._received = bytearray()  # and not taken
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)
        self._lock = threading.Lock()  # of what follows
        self._unsent = bytearray()
        self._sender: threading.Thread | None = None  # while it has something to send
        self._is_closed = False

    def send(self, frame: bytes) -> None:
        """Sends a frame behind those before; never waits. One that nobody will receive is dropped."""
        with self._lock:
            if self._is_closed:
                return
            self._unsent += LENGTH.pack(len(frame)) + frame
            if self._sender is None and not self._send_some():
                self._sender = threading.Thread(target=self._send_rest, name="lamina-sender", daemon=True)
                self._sender.start()

    def receive(self, seconds: float | None) -> bytes | None:
        """Returns the next frame, and waits so long for it; seconds None: until it comes.

        Raises EOFError once the other end is no more and all that it sent has been received.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while (frame := self._take_whole()) is None:
            if deadline is not None and not self._readable.poll(1000 * max(0.0, deadline - time.monotonic())):
                break
            self._receive_some()
        return frame

    def flush(self, seconds: float) -> None:
        """Waits so long, at most, until all is sent."""
        sender = self._sender
        if sender is not None:
            sender.join(seconds)

    def end_receiving(self) -> None:
        """Has receive() raise EOFError when it has returned what has come; any thread may call."""
        with suppress(OSError):  # where the other end has gone before
            self._connection.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Drops what is unsent; by who receives, or once nobody does."""
        with self._lock:
            self._is_closed = True
            self._unsent.clear()
            sender = self._sender
            with suppress(OSError):  # as before; who waits to send more is to look again
                self._connection.shutdown(socket.SHUT_RDWR)
        if sender is not None:
            sender.join()  # before the number of the descriptor may be another's
        self._connection.close()

    def _take_whole(self) -> bytes | None:
        received, start = self._received, LENGTH.size
        if len(received) < start:
            return None
        end = start + LENGTH.unpack_from(received)[0]
        if len(received) < end:
            return None
        frame = bytes(received[start:end])
        del received[:end]
        return frame

    def _receive_some(self) -> None:
        try:
            num_bytes = self._connection.recv_into(self._room)
        except ConnectionError:  # it went without reading all
            num_bytes = 0
        if not num_bytes:
            raise EOFError("the other end of the socket is closed")
        self._received += self._room[:num_bytes]

    def _send_some(self) -> bool:
        """Sends what goes at once; returns whether nothing is left, or nobody is there to take it."""
        try:
            del self._unsent[: self._connection.send(self._unsent, AT_ONCE)]
        except BlockingIOError:
            return False
        except OSError:
            self._unsent.clear()
        return not self._unsent

    def _send_rest(self) -> None:
        is_done = False
        while not is_done:
            self._writable.poll()
            with self._lock:
                is_done = self._is_closed or self._send_some()
                if is_done:
                    self._sender = None
