"""Ctrl-C is taken between two tokens."""

import os
import signal

import pytest

from lamina.cli.interrupt import StopOnInterrupt


def test_first_interrupt_asks_and_second_raises():
    with StopOnInterrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_handler_found_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    with StopOnInterrupt():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
