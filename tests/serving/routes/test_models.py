"""GET /v1/models: every name is told, and found again by it."""

from types import SimpleNamespace

import pytest

from lamina.serving.config import ServeConfig
from lamina.serving.context import Serving
from lamina.serving.errors import ApiError
from lamina.serving.protocol.generation import check_model
from lamina.serving.routes.models import model_entry


@pytest.fixture
def serving() -> Serving:
    names = ("org/tiny", "tiny")
    runtime = SimpleNamespace(input=SimpleNamespace(max_model_len=256))
    return Serving(config=ServeConfig(model_names=names), runtime=runtime)


def test_an_answer_carries_the_name_that_was_asked_by(serving: Serving) -> None:
    assert check_model("tiny", serving.config) == "tiny"
    assert check_model("org/tiny", serving.config) == "org/tiny"
    assert check_model(None, serving.config) == "org/tiny"


@pytest.mark.parametrize("name", ["", "Tiny", "tiny ", "org", "x" * 10**6])
def test_another_name_is_not_found(serving: Serving, name: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_model(name, serving.config)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert "org/tiny" in caught.value.message
    assert len(caught.value.body()) < 1000


def test_an_entry_tells_the_context_and_the_root(serving: Serving) -> None:
    entry = model_entry(serving, "tiny")
    assert entry["id"] == "tiny"
    assert entry["root"] == "org/tiny"
    assert entry["max_model_len"] == 256
    assert entry["object"] == "model"
    assert isinstance(entry["created"], int)
