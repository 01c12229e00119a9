"""docs/request_fields.md names every field that is served, accepted or refused."""

import re
from pathlib import Path

import pytest

from lamina.serving.config import ServeConfig
from lamina.serving.protocol.chat import ChatRequest
from lamina.serving.protocol.completions import CompletionRequest
from lamina.serving.protocol.decoding import MOST_OBJECTS, MOST_VALUES
from lamina.serving.protocol.generation import StreamOptions
from lamina.serving.protocol.responses import ResponsesRequest

PAGE = (Path(__file__).parents[3] / "docs" / "request_fields.md").read_text()
NAMES = set(re.findall(r"`(\w+)`", PAGE))


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, ResponsesRequest])
def test_every_field_is_documented(kind):
    assert set(kind.__struct_fields__) <= NAMES
    assert set(kind.unserved) <= NAMES
    assert kind.accepted <= NAMES


def test_options_of_streams_are_documented_but_the_one_that_does_nothing():
    assert set(StreamOptions.__struct_fields__) - NAMES == {"include_obfuscation"}


def test_bounds_are_those_of_the_server():
    config = ServeConfig(model_names=("tiny",))
    documented = dict(re.findall(r"`--(max-[a-z-]+)` (\d+)", PAGE))
    assert len(documented) == 10
    for name, value in documented.items():
        assert getattr(config, name.replace("-", "_")) == int(value), name
    assert {str(MOST_VALUES), str(MOST_OBJECTS)} <= set(re.findall(r"\d+", PAGE))
