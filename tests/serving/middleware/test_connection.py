"""What a connection does with clients that are odd, slow, old, greedy or hostile."""

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest

from ...engine_gate import comes_true
from ..conftest import RunningServer
from ..raw import post, raw_client

GET = b"GET /version HTTP/1.1\r\nhost: test\r\n\r\n"
COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "temperature": 0}
BODY = json.dumps(COMPLETION).encode()


@pytest.fixture(scope="module")
def strict_server(start_server: Callable[..., RunningServer]) -> RunningServer:
    """A server with small limits, and patience."""
    return start_server(max_connections=8, max_body_bytes=1000, max_header_bytes=2000)


@pytest.fixture(scope="module")
def hasty_server(start_server: Callable[..., RunningServer]) -> RunningServer:
    """A server with short patience."""
    return start_server(header_timeout=0.5, body_timeout=0.5, keep_alive_timeout=0.7, send_timeout=0.5)


def test_requests_that_come_in_one_piece_are_answered_in_order(server: RunningServer) -> None:
    with raw_client(server.url) as client:
        client.send(
            GET + post("/v1/completions", BODY) + b"GET /nowhere HTTP/1.1\r\nhost: test\r\n\r\n" + GET
        )
        assert [client.read().status for _ in range(4)] == [200, 200, 404, 200]


@pytest.mark.parametrize("size", [1, 7])
def test_a_request_that_comes_in_pieces_is_answered_as_a_whole_one(server: RunningServer, size: int) -> None:
    request = post("/v1/completions", BODY)
    with raw_client(server.url) as client:
        for start in range(0, len(request), size):
            client.send(request[start : start + size])
        whole = client.read()
        client.send(request)
        assert whole.status == 200
        assert json.loads(whole.body)["choices"] == json.loads(client.read().body)["choices"]


def test_a_body_in_chunks_is_read(server: RunningServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:10], BODY[10:11], BODY[11:]))
    with raw_client(server.url) as client:
        client.send(head + chunks + b"0\r\n\r\n")
        assert client.read().status == 200
        client.send(head + b"zz\r\n")
        refusal = client.read()
        assert refusal.status == 400
        assert refusal.error["code"] == "invalid_http"
        assert client.is_closed()


def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(server: RunningServer) -> None:
    with raw_client(server.url) as client:
        request = post("/v1/completions", BODY, "expect: 100-continue")
        client.send(request[: -len(BODY)])
        assert client.file.readline() == b"HTTP/1.1 100 Continue\r\n"
        client.file.readline()
        client.send(BODY)
        assert client.read().status == 200


def test_who_waits_for_leave_and_is_refused_may_send_no_body(server: RunningServer) -> None:
    with raw_client(server.url) as client:
        client.send(post("/nowhere", BODY, "expect: 100-continue")[: -len(BODY)])
        answer = client.read()
        assert answer.status == 404
        assert answer.headers["connection"] == "close"
        assert client.is_closed()


def test_a_client_that_takes_no_answers_is_dropped_and_holds_nothing(hasty_server: RunningServer) -> None:
    with raw_client(hasty_server.url) as client:
        with pytest.raises(OSError):
            _send_now_and_then(client, GET.replace(b"version", b"openapi.json") * 200)
        assert comes_true(lambda: not hasty_server.server.lifecycle.num_running)
        assert httpx.get(f"{hasty_server.url}/version").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_gets_a_body_without_chunks_that_ends_with_the_connection(
    server: RunningServer, stream: bool
) -> None:
    body = json.dumps({**COMPLETION, "stream": stream}).encode()
    with raw_client(server.url) as client:
        client.send(post("/v1/completions", body, version="1.0"))
        answer = client.read()
        assert answer.status == 200
        assert "transfer-encoding" not in answer.headers
        assert answer.headers["connection"] == "close"
        if stream:
            assert answer.body.startswith(b"data: {")
            assert answer.body.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(answer.body)["choices"]
        assert client.is_closed()


@pytest.mark.parametrize(
    "garbage",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: t\r\n\r\n",
        b"CONNECT test:80 HTTP/1.1\r\nhost: t\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nx-request-id: a\x00b\r\n\r\n",
        b"GET /version HTTP/1.1\r\n\r\n",
        b"GET /version HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET /version\r\n\r\n",
        b"GET /version HTTP/2.0\r\nhost: t\r\n\r\n",
        b"CONNECT /version HTTP/1.1\r\nhost: t\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: t\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nhost: t\r\na: b\r\n c\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_in_the_one_shape_and_the_connection_closed(
    server: RunningServer, garbage: bytes
) -> None:
    with raw_client(server.url) as client:
        client.send(garbage)
        refusal = client.read()
        assert refusal.status == 400
        assert refusal.error["type"] == "invalid_request_error"
        assert client.is_closed()


OFFER = b"connection: upgrade\r\nupgrade: h2c\r\n"


def test_an_offer_of_another_protocol_is_passed_over(server: RunningServer) -> None:
    with raw_client(server.url) as client:
        client.send(GET.replace(b"host", OFFER + b"host") * 3000 + GET)
        assert [client.read().status for _ in range(3001)] == [200] * 3001


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("size", [1, 40, 1000])
def test_a_body_behind_an_offer_of_another_protocol_is_a_body(
    server: RunningServer, is_chunked: bool, size: int
) -> None:
    """As Java's client offers HTTP/2; were the body read as a request, a proxy could be deceived by it."""
    smuggled = b" " + GET
    bodies = [(BODY, 200), (smuggled, 400)]
    with raw_client(server.url) as client:
        for body, status in bodies:
            request = post("/v1/completions", body)
            if is_chunked:
                head, _, _ = request.partition(b"content-length")
                framed = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
                request = head + b"transfer-encoding: chunked\r\n\r\n" + framed
            request = request.replace(b"host", OFFER + b"host", 1) + GET
            for start in range(0, len(request), size):
                client.send(request[start : start + size])
            assert [client.read().status for _ in range(2)] == [status, 200]


def test_what_trails_a_body_is_no_header_and_bounded(strict_server: RunningServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n"
    body = b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
    with raw_client(strict_server.url) as client:
        client.send(head + b"\r\n" + body + b"content-type: text/plain\r\n\r\n")
        assert client.read().status == 200
        for trailer in (b"a: b\r\n" * 1000, b"a: " + b"b" * 4000):
            with raw_client(strict_server.url) as greedy:
                greedy.send(head + b"\r\n" + body)
                greedy.send(trailer)
                assert greedy.read().status == 431


def test_many_requests_in_one_piece_are_no_large_headers(strict_server: RunningServer) -> None:
    with raw_client(strict_server.url) as client:
        client.send(GET * 100 + GET[:-10])
        client.send(GET[-10:])
        assert [client.read().status for _ in range(101)] == [200] * 101


@pytest.mark.parametrize("where", ["path", "value", "many"])
@pytest.mark.parametrize("is_whole", [False, True])
def test_headers_beyond_the_limit_are_refused_whole_or_not(
    strict_server: RunningServer, where: str, is_whole: bool
) -> None:
    path = b"/" + b"x" * 4000 if where == "path" else b"/version"
    headers = {"path": b"", "value": b"x-long: " + b"y" * 4000 + b"\r\n", "many": b"a: b\r\n" * 700}[where]
    with raw_client(strict_server.url) as client:
        client.send(b"GET " + path + b" HTTP/1.1\r\n" + headers + (b"\r\n" if is_whole else b""))
        refusal = client.read()
        assert refusal.status == 431
        assert "2000 bytes" in refusal.error["message"]
        assert client.is_closed()


def test_a_megabyte_of_request_id_is_refused(server: RunningServer) -> None:
    with raw_client(server.url) as client:
        client.send(b"GET /version HTTP/1.1\r\nx-request-id: " + b"a" * 65_600)
        assert client.read().status == 431


def test_a_body_beyond_the_limit_is_refused_by_its_length_or_once_it_is_longer(
    strict_server: RunningServer,
) -> None:
    with raw_client(strict_server.url) as client:
        client.send(post("/v1/completions", b" " * 5000))
        assert client.read().status == 413
        client.send(post("/v1/completions", BODY))  # what was refused is passed over
        assert client.read().status == 200
        head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
        client.send(head + b"400\r\n" + b" " * 1024 + b"\r\n0\r\n\r\n")
        refusal = client.read()
        assert refusal.status == 413
        assert "at most 1000" in refusal.error["message"]


def test_a_client_that_says_nothing_is_cut(hasty_server: RunningServer) -> None:
    with raw_client(hasty_server.url) as client:
        assert client.is_closed()


@pytest.mark.parametrize("before", [b"", GET])
def test_headers_that_trickle_are_cut(hasty_server: RunningServer, before: bytes) -> None:
    with raw_client(hasty_server.url) as client:
        client.send(before + b"GET /version HTTP/1.1\r\nx-slow: ")
        if before:
            assert client.read().status == 200
        refusal = _trickle(client, b"y")
        assert refusal.status == 408
        assert refusal.error["type"] == "request_timeout"
        assert client.is_closed()


def test_a_body_that_trickles_is_cut(hasty_server: RunningServer) -> None:
    with raw_client(hasty_server.url) as client:
        client.send(post("/v1/completions", b" " * 900)[:-900])
        refusal = _trickle(client, b" ")
        assert refusal.status == 408
        assert "body" in refusal.error["message"]
        client.socket.settimeout(60)
        assert client.is_closed()


def test_what_trickles_in_after_an_answer_does_not_hold_the_connection(hasty_server: RunningServer) -> None:
    with raw_client(hasty_server.url) as client:
        client.send(post("/nowhere", b" " * 900)[:-900])
        assert client.read().status == 404
        with pytest.raises(OSError):
            _send_now_and_then(client, b"\r\n")


def test_a_connection_that_rests_is_closed(start_server: Callable[..., RunningServer]) -> None:
    with raw_client(start_server(keep_alive_timeout=0.2).url) as client:
        client.send(GET)
        assert client.read().status == 200
        assert client.is_closed()


def test_one_connection_too_many_is_told_so_and_the_others_go_on(strict_server: RunningServer) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(raw_client(strict_server.url)) for _ in range(8)]
        for client in clients:
            client.send(GET)
            assert client.read().status == 200
        with raw_client(strict_server.url) as refused:
            refusal = refused.read()
            assert refusal.status == 503
            assert refusal.headers["retry-after"]
            assert refusal.error["type"] == "overloaded_error"
            assert refused.is_closed()
        for client in clients:
            client.send(GET)
            assert client.read().status == 200


def test_garbage_behind_a_stream_does_not_get_into_it(server: RunningServer) -> None:
    body = json.dumps({**COMPLETION, "max_tokens": 60, "ignore_eos": True, "stream": True}).encode()
    with raw_client(server.url) as client:
        with server.held() as engine:
            client.send(post("/v1/completions", body))
            engine.begin(1)
            assert client.file.readline() == b"HTTP/1.1 200 OK\r\n"
            client.send(b"\x00\x01garbage\r\n\r\n")
            server.comes_round()
        rest = client.file.read()
        assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b"invalid_http" not in rest


def test_a_request_ends_with_its_client_though_another_waits_behind_it(server: RunningServer) -> None:
    body = json.dumps({**COMPLETION, "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
    with server.held() as engine:  # it cannot end otherwise
        with raw_client(server.url) as client:
            client.send(post("/v1/completions", body) + GET)
            engine.begin(1)
            assert client.file.readline() == b"HTTP/1.1 200 OK\r\n"
        server.comes_to_rest()


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_closes_its_sending_side_counts_as_gone(server: RunningServer, streams: bool) -> None:
    body = json.dumps({**COMPLETION, "max_tokens": 200, "ignore_eos": True, "stream": streams}).encode()
    with server.held() as engine, raw_client(server.url) as client:  # it cannot end otherwise
        client.send(post("/v1/completions", body))
        engine.begin(1)
        if streams:
            assert client.file.readline() == b"HTTP/1.1 200 OK\r\n"
        client.socket.shutdown(socket.SHUT_WR)
        assert b"[DONE]" not in client.file.read()
        server.comes_to_rest()


def test_a_body_cut_off_frees_what_it_held(server: RunningServer) -> None:
    with raw_client(server.url) as client:
        client.send(post("/v1/completions", BODY)[:-5])
        assert comes_true(lambda: server.server.lifecycle.num_running)
    server.comes_to_rest()


def _send_now_and_then(client: Any, data: bytes) -> None:
    for _ in range(600):
        client.send(data)
        time.sleep(0.05)


def _trickle(client: Any, byte: bytes) -> Any:
    """Send a byte now and then until there is an answer, and read that."""
    client.socket.settimeout(0.05)
    for _ in range(1200):
        with suppress(OSError):  # it may have answered and closed: then there is something to read
            client.send(byte)
        try:
            first = client.socket.recv(1, 2)  # MSG_PEEK
        except TimeoutError:
            continue
        assert first, "closed without an answer"
        client.socket.settimeout(60)
        return client.read()
    raise AssertionError("the server waits for ever")
