"""The ring in shared memory: every reader gets every frame, in order, whoever is slow."""

import os
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.common.errors import WireError
from lamina.runtime.executor import shared_ring
from lamina.runtime.executor.shared_ring import SharedRing

CAPACITY = 64
ACTIONS = st.one_of(st.integers(1, CAPACITY), st.sampled_from(["read 0", "read 1", "look 0", "look 1"]))


@pytest.fixture
def make_ring(monkeypatch):
    """make_ring(num_readers) -> the writer's ring and the readers', which hold little."""
    monkeypatch.setattr(shared_ring, "CAPACITY", CAPACITY)
    monkeypatch.setattr(shared_ring, "NUM_PLACES", 4)
    opened = []

    def make(num_readers):
        fd = SharedRing.new_memory(num_readers)
        rings = [SharedRing(fd, num_readers, reader) for reader in (None, *range(num_readers))]
        os.close(fd)
        opened.extend(rings)
        return rings

    yield make
    for ring in opened:
        ring.close()


def test_every_reader_gets_every_frame_in_order(make_ring):
    @given(st.lists(ACTIONS, max_size=60))
    def check(actions):
        writer, *readers = make_ring(2)
        unread = [deque(), deque()]
        for number, action in enumerate(actions):
            if isinstance(action, int):
                frame = bytes([number]) * action
                if writer.write(frame):
                    for queue in unread:
                        queue.append(frame)
                else:
                    assert any(unread), "an empty ring has room for any frame"
            else:
                which = int(action[-1])
                assert_next(readers[which], unread[which], passes=action.startswith("read"))
        for reader, queue in zip(readers, unread, strict=True):
            while queue:
                assert_next(reader, queue, passes=True)
            assert reader.peek() is None

    check()


def assert_next(reader, queue, *, passes):
    frame = reader.peek()
    if frame is None:
        assert not queue
        return
    with frame:
        assert bytes(frame) == queue[0]
    if passes:
        reader.pass_by()
        queue.popleft()


def test_a_frame_that_can_never_fit_is_an_error_and_a_full_ring_is_not(make_ring):
    writer, reader = make_ring(1)
    with pytest.raises(WireError, match="65 bytes; wanted at most 64"):
        writer.write(b"x" * 65)
    assert writer.write(b"x" * 64)
    assert not writer.write(b"y")
    with reader.peek() as frame:
        assert bytes(frame) == b"x" * 64
    reader.pass_by()
    assert writer.write(b"y")


def test_a_write_that_was_interrupted_before_its_end_never_was(make_ring):
    writer, reader = make_ring(1)
    assert writer.write(b"one")

    class InterruptError(BaseException):
        pass

    def interrupt():
        raise InterruptError

    writer._pass_fence = interrupt
    with pytest.raises(InterruptError):
        writer.write(b"lost")
    del writer._pass_fence
    assert writer.write(b"two")
    for wanted in (b"one", b"two"):
        with reader.peek() as frame:
            assert bytes(frame) == wanted
        reader.pass_by()
    assert reader.peek() is None


def test_a_reader_with_nothing_to_read_is_named_to_the_writer_until_it_is_awake(make_ring):
    writer, first, second = make_ring(2)
    assert writer.waiting_readers() == []
    assert second.begin_wait()
    assert writer.write(b"a")
    assert writer.waiting_readers() == [1]
    assert not first.begin_wait(), "there is a frame to read"
    first.end_wait()
    second.end_wait()
    assert writer.waiting_readers() == []


class Interrupted:
    """Words of a ring, before the n-th use of which something happens."""

    def __init__(self, words, number, happen):
        self._words, self._left, self._happen = words, number, happen

    def _use(self):
        self._left -= 1
        if self._left == 0:
            self._happen()

    def __getitem__(self, place):
        self._use()
        return self._words[place]

    def __setitem__(self, place, value):
        self._use()
        self._words[place] = value


@pytest.mark.parametrize("number", [1, 2, 3])
def test_whenever_a_frame_comes_a_reader_stays_awake_or_is_woken(make_ring, number):
    writer, reader = make_ring(1)
    woken = []

    def write():
        assert writer.write(b"a")
        woken.extend(writer.waiting_readers())

    words = reader._words
    reader._words = Interrupted(words, number, write)
    sleeps = reader.begin_wait()
    reader._words = words
    with reader.peek() as frame:
        assert bytes(frame) == b"a"
    assert not sleeps or woken == [0]


def test_a_heartbeat_is_seen_by_the_reader(make_ring):
    writer, reader = make_ring(1)
    assert reader.last_beat == (0, False)
    writer.beat(123, True)
    assert reader.last_beat == (123, True)
