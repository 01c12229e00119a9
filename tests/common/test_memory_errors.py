"""Refused memory is distinguished from other errors, whoever refuses it."""

import errno

import pytest
import torch

from lamina.common.errors import ConfigError, LoadError
from lamina.common.memory_errors import in_brief, is_out_of_memory, memory_explained


def _huge_tensor():
    torch.empty(1 << 60, dtype=torch.uint8)


def _huge_bytes():
    bytearray(1 << 60)


@pytest.mark.parametrize("ask", [_huge_tensor, _huge_bytes])
def test_what_asks_for_more_than_there_is_is_a_load_error_with_the_remedy(ask):
    with (
        pytest.raises(LoadError, match=r"memory ran out while it was read: .+; lower it") as raised,
        memory_explained("it was read", "lower it"),
    ):
        ask()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "x"), torch.OutOfMemoryError("CUDA out of memory.")])
def test_errors_of_the_system_and_of_gpus_count(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "x"), RuntimeError("shapes"), ConfigError("out of memory")]
)
def test_other_errors_pass(error):
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)) as raised, memory_explained("it was read", "lower it"):
        raise error
    assert raised.value is error


def test_an_error_without_a_word_is_still_a_sentence():
    assert in_brief(MemoryError()) == "an allocation was refused"
