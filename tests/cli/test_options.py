"""Every setting and parameter is an option of every command, with choices that are those of the library."""

import dataclasses
import json
import subprocess
import sys
from typing import get_args

import pytest
import typer.testing

from lamina import Runtime
from lamina.cli import app, options
from lamina.compiler.numerics import NUMERICS
from lamina.custom_ops._shared import registry
from lamina.models.quantization.scheme import scheme_names
from lamina.runtime import config, parallel
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.sampling_params import SamplingParams
from lamina.runtime.worker import attention

COMMANDS = ("generate", "chat", "warmup", "explain", "verify", "info")


def invoke(*arguments, code=0):
    result = typer.testing.CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def test_choices_are_those_of_the_library():
    assert attention.registry is registry
    truth = {
        "dtype": ("auto", *config.DTYPES),
        "kv_cache_dtype": get_args(config.KVCacheDtype),
        "device": ("auto", "cpu", "cuda"),
        "quantization": scheme_names(),
        "numerics": NUMERICS,
        "attention": ("auto", *registry.providers("paged_attention")),
        "pooling": get_args(config.PoolingSetting),
        "load_format": get_args(config.LoadFormat),
        "executor": get_args(parallel.ExecutorName),
        "ray_placement": get_args(parallel.RayPlacement),
    }
    assert {name: set(values) for name, values in truth.items()} == {
        name: set(values) for name, values in options.CHOICES.items()
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_is_an_option_of_every_command(command):
    text = invoke(command, "-h").output
    for field in dataclasses.fields(RuntimeConfig):
        if field.name not in options.NOT_SETTINGS:
            assert f"--{field.name.replace('_', '-')}" in text, field.name
    assert "--model" in text
    assert "--no-compile" in text


@pytest.mark.parametrize("command, without", [("generate", ()), ("chat", options.OF_SEVERAL)])
def test_every_sampling_parameter_is_an_option(command, without):
    text = invoke(command, "--help").output
    for field in dataclasses.fields(SamplingParams):
        if field.name not in (*options.NOT_SAMPLING, *without):
            assert f"--{field.name.replace('_', '-')}" in text, field.name


def test_what_is_given_reaches_the_config_and_what_is_not_is_left_to_it():
    given = {"dtype": "float16", "max_num_seqs": 3, "prefix_cache": False, "model_option": None}
    settings = options.Settings(dict.fromkeys(("compile", "without_pass", "revision")) | given)
    wanted = RuntimeConfig(model="m", dtype="float16", max_num_seqs=3, prefix_cache=False)
    assert settings.config("m") == wanted
    assert options.Sampling({"stop": ["x"], "top_k": None}).params() == SamplingParams(stop=["x"])


@pytest.mark.parametrize(
    "words, model, prompts",
    [(["m", "p"], "m", ["p"]), (["m", "p", "q"], "m", ["p", "q"]), (["m", "-"], "m", ["-"])],
)
def test_the_first_word_is_the_model(words, model, prompts):
    assert options.Settings({"model_option": None}).split(words) == (model, prompts)


def test_with_the_option_every_word_is_a_prompt():
    assert options.Settings({"model_option": "m"}).split(["p", "q"]) == ("m", ["p", "q"])


@pytest.mark.demo
def test_info_of_a_gguf_file_writes_kilobytes(demo_model, tmp_path):
    """In a process of its own: kernels that one has loaded are kept in whatever cache comes next."""
    command = [sys.executable, "-m", "lamina", "info", demo_model, "--json", "--cache-dir", tmp_path]
    facts = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert 0.1 < facts["weights_gib"] < 0.2  # its blocks as they lie
    assert facts["cache_dir"] == str(tmp_path)
    written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert written < 100_000


def test_the_cache_names_models(tiny_folder, compile_cache):
    with Runtime.from_pretrained(tiny_folder, compile=False, cache_dir=compile_cache):
        pass
    rows = json.loads(invoke("cache", "list", "--json", "--cache-dir", compile_cache).stdout)
    assert {row["kind"] for row in rows if tiny_folder.name in row["models"]} >= {"serving"}
    assert "names" not in {row["kind"] for row in rows}
    assert tiny_folder.name in invoke("cache", "list", "--cache-dir", compile_cache).stdout


@pytest.mark.long
def test_equal_reasons_are_told_once(tiny_folder, compile_cache):
    arguments = ("--device", "cpu", "--cache-dir", compile_cache)
    lines = invoke("explain", tiny_folder, *arguments).stdout.splitlines()
    blocks = "\n".join(lines).split("\npiece ")
    for block in blocks:
        for report in block.split("  pass "):
            reasons = [line for line in report.splitlines() if line.startswith("    ")]
            assert len(reasons) == len(set(reasons))
