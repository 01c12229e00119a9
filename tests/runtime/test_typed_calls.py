"""Type checkers know the public entry points: keywords by name and type, answers by type."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import lamina
from lamina.runtime import vllm
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.keywords import LLMSettings, RequestSettings, RuntimeSettings
from lamina.runtime.request_options import RequestOptions
from lamina.runtime.runtime import Runtime

CALLS = Path(__file__).with_name("typed_calls.py")
# Without the libraries below, whose types these calls do not need, mypy is done in seconds.
MYPY = """
[mypy]
strict = True
follow_imports = silent
mypy_path = {source}
[mypy-gguf.*,huggingface_hub.*,jinja2.*,numpy.*,rich.*,safetensors.*,tokenizers.*,torch.*,transformers.*]
follow_imports = skip
[mypy-triton.*,xxhash.*]
follow_imports = skip
"""


def types_of(config):
    hints = get_type_hints(config)
    return {field.name: hints[field.name] for field in dataclasses.fields(config)}


@pytest.mark.parametrize(
    "keywords,config,own",
    [(RuntimeSettings, RuntimeConfig, {"model"}), (RequestSettings, RequestOptions, set())],
)
def test_keywords_are_the_fields_of_their_config(keywords, config, own):
    expected = types_of(config)
    assert get_type_hints(keywords) == {name: kind for name, kind in expected.items() if name not in own}
    assert own <= set(expected)
    assert keywords.__required_keys__ == frozenset()


def test_keywords_of_llm_are_the_settings_that_it_knows():
    named = set(inspect.signature(vllm.LLM.__init__).parameters)
    assert set(LLMSettings.__annotations__) == (vllm.OURS.keys() | vllm.NEUTRAL.keys()) - named


def test_what_is_passed_on_is_typed_as_it_is_here():
    """Settings that go to RuntimeConfig by another name, or by the same: as there, or None for ours."""
    theirs, ours = get_type_hints(LLMSettings), types_of(RuntimeConfig)
    elsewise = (
        "tokenizer",
        "kv_cache_dtype",
        "executor",
    )  # values of theirs have other types, or other names
    passed = {name: target for name, target in vllm.OURS.items() if name in theirs and target not in elsewise}
    assert len(passed) > 10
    for name, target in passed.items():
        assert theirs[name] in (ours[target], ours[target] | None), name


@pytest.mark.parametrize(
    "entry,keywords",
    [
        (Runtime.from_pretrained, RuntimeSettings),
        *((getattr(Runtime, name), RequestSettings) for name in ("generate", "stream", "beam_search")),
        *((getattr(Runtime, name), RequestSettings) for name in ("chat", "stream_chat")),
        (vllm.LLM.__init__, LLMSettings),
    ],
)
def test_editors_see_the_keywords_of_an_entry_point(entry, keywords):
    (rest,) = (each for each in inspect.signature(entry).parameters.values() if each.kind is each.VAR_KEYWORD)
    assert rest.annotation.__args__ == (keywords,)


def test_mypy_finds_what_is_wrong_and_nothing_else(tmp_path):
    config = tmp_path / "mypy.ini"
    config.write_text(MYPY.format(source=Path(lamina.__file__).parent.parent))
    told = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", tmp_path / "cache", CALLS],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    found: dict[int, list[str]] = {}
    for line, code in re.findall(r"typed_calls\.py:(\d+): error: .*\[([\w-]+)\]$", told.stdout, re.MULTILINE):
        found.setdefault(int(line), []).append(code)
    marked = {
        number: line.split("# error: ")[1].split()
        for number, line in enumerate(CALLS.read_text().splitlines(), 1)
        if "# error: " in line
    }
    assert found == marked, told.stdout + told.stderr
    assert told.returncode == 1
