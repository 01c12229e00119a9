"""The socket between two processes: every frame arrives whole and in order, and no sender waits."""

import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.runtime.engine.core_socket import CoreSocket

FULL = 8 << 20  # bytes, far more than a socket holds for who does not read


@pytest.fixture
def ends():
    own, theirs = map(CoreSocket, socket.socketpair())
    yield own, theirs
    own.close()
    theirs.close()


def received(end, number):
    return [end.receive(60) for _ in range(number)]


@given(st.lists(st.binary(max_size=300) | st.integers(0, 200_000).map(bytes), max_size=30))
def test_frames_of_any_size_arrive_as_they_were_sent(frames):
    own, theirs = map(CoreSocket, socket.socketpair())
    for frame in frames:
        own.send(frame)
    assert received(theirs, len(frames)) == frames
    assert theirs.receive(0) is None
    own.close()
    with pytest.raises(EOFError):
        theirs.receive(60)
    theirs.close()


def test_frames_of_several_threads_keep_each_threads_order(ends):
    own, theirs = ends
    senders = [
        threading.Thread(target=lambda who=who: [own.send(bytes([who]) * (1 + n)) for n in range(600)])
        for who in range(4)
    ]
    for sender in senders:
        sender.start()
    found = received(theirs, 4 * 600)
    for who in range(4):
        assert [len(frame) for frame in found if frame[0] == who] == list(range(1, 601))
    for sender in senders:
        sender.join()


def test_what_nobody_reads_yet_is_kept_and_comes_before_what_is_sent_later(ends):
    own, theirs = ends
    own.send(bytes(FULL))  # returns, though nobody has read any of it
    own.send(b"later")
    assert [len(frame) for frame in received(theirs, 2)] == [FULL, 5]
    own.flush(60)
    own.send(b"latest")
    assert theirs.receive(60) == b"latest"


def test_what_was_sent_before_an_end_is_received_and_then_the_end(ends):
    own, theirs = ends
    own.send(b"last words")
    theirs.end_receiving()
    assert theirs.receive(60) == b"last words"
    with pytest.raises(EOFError):
        theirs.receive(60)


def test_a_frame_that_was_cut_off_by_an_end_is_none(ends):
    own, theirs = ends
    own.send(bytes(FULL))
    own.close()
    with pytest.raises(EOFError):
        theirs.receive(60)


def test_to_send_to_nobody_does_nothing(ends):
    own, theirs = ends
    own.send(bytes(FULL))
    theirs.close()
    own.flush(60)
    own.send(b"unheard")
    own.close()
    own.send(b"unheard")


def test_a_receiver_is_woken_by_a_frame_and_waits_no_longer_than_it_is_told(ends):
    own, theirs = ends
    assert theirs.receive(0.01) is None
    threading.Thread(target=lambda: (time.sleep(0.05), own.send(b"now"))).start()
    assert theirs.receive(None) == b"now"


def test_no_sender_is_left_that_waits_on_the_next_owner_of_a_descriptor(ends):
    own, _ = ends
    own.send(bytes(FULL))
    assert [thread for thread in threading.enumerate() if thread.name == "lamina-sender"]
    own.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "lamina-sender"]
