"""What a server can be set to, and how it says what it cannot."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lamina.common.errors import ConfigError, UnknownSettingError
from lamina.serving import config
from lamina.serving.config import ServeConfig


@pytest.mark.parametrize(
    "name, value",
    [
        ("model_names", ()),
        ("model_names", 5),
        ("model_names", ["a", ""]),
        ("model_names", ["a\nb"]),
        ("model_names", ["a", "a"]),
        ("host", ""),
        ("host", "a b\n"),
        ("host", 127),
        ("port", -1),
        ("port", 65536),
        ("port", "80"),
        ("port", True),
        ("uds", ""),
        ("uds", "x" * 108),
        ("uds", "a\0b"),
        ("tls_key", "key.pem"),
        ("root_path", "lamina"),
        ("root_path", "/lamina/"),
        ("root_path", "/"),
        ("root_path", "/lämina"),
        ("strict_fields", 1),
        ("exit_on_engine_loss", None),
        ("max_restarts", -1),
        ("max_body_bytes", 0),
        ("max_connections", 0),
        ("max_header_bytes", 1),
        ("drain_timeout", -1),
        ("drain_timeout", float("nan")),
        ("body_timeout", 0),
        ("keep_alive_timeout", float("inf")),
        ("cors_origins", ["page"]),
    ],
)
def test_a_value_that_it_cannot_have_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        ServeConfig(**{"model_names": ("tiny",), name: value})


def test_a_server_that_outlives_its_engine_loads_no_other() -> None:
    with pytest.raises(ConfigError, match="max_restarts is 1 and exit_on_engine_loss False"):
        ServeConfig(model_names=("tiny",), max_restarts=1, exit_on_engine_loss=False)


def test_an_unknown_setting_is_refused_with_one_that_resembles_it() -> None:
    with pytest.raises(UnknownSettingError, match="did you mean 'drain_timeout'"):
        ServeConfig(model_names=("tiny",), drain_time=3)


def test_values_come_in_the_form_that_they_are_kept_in() -> None:
    made = ServeConfig(model_names="tiny", cors_origins=["*"], uds="socket", drain_timeout=0)
    assert (made.model_names, made.cors_origins) == (("tiny",), ("*",))
    assert made.uds == Path("socket")
    assert made.drain_timeout == 0.0


def test_every_field_is_checked_and_its_default_is_one_that_it_can_have() -> None:
    special = {"host", "root_path", "otlp_traces_endpoint"}
    checked = {
        *config.LISTS,
        *config.FLAGS,
        *config.COUNTS,
        *config.SECONDS,
        *config.PATHS,
        *special,
        *config.PARSERS,
    }
    names = {field.name for field in fields(ServeConfig)}
    assert names == checked
