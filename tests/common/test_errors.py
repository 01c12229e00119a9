"""Every error reaches another process as it is."""

import copy
import pickle

import pytest

from lamina.common import errors
from lamina.common.errors import LaminaError, ProcessorError


def subclasses(kind):
    return [kind, *(below for each in kind.__subclasses__() for below in subclasses(each))]


KINDS = [kind for kind in subclasses(LaminaError) if kind.__module__ == errors.__name__]


def made(kind):
    return kind("what went wrong", "request-7") if kind is ProcessorError else kind("what went wrong")


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_pickling_and_copying(kind):
    error = made(kind)
    error.add_note("a note")
    for again in (
        *(pickle.loads(pickle.dumps(error, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)),
        copy.copy(error),
        copy.deepcopy(error),
    ):
        assert type(again) is kind
        assert str(again) == str(error)
        assert again.args == error.args
        assert vars(again) == vars(error)


class Detailed(LaminaError):
    """As one of a plugin may be."""

    def __init__(self, *, layer: int) -> None:
        super().__init__(f"layer {layer} failed")
        self.layer = layer


def test_an_error_with_arguments_of_its_own_survives_too():
    again = pickle.loads(pickle.dumps(Detailed(layer=3)))
    assert (str(again), again.layer) == ("layer 3 failed", 3)
