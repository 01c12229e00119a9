"""`lamina quantize` as a process: what it prints, and what it leaves when it is stopped or out of room."""

import json
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from lamina.cli import app
from lamina.cli.quantize import Scheme
from lamina.common.errors import LoadError
from lamina.models.quantizing.recipe import SCHEMES
from lamina.runtime.quantize import DEFAULT_CALIBRATION_TOKENS

from .test_process import run, start


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def test_schemes_and_defaults_are_those_of_the_library() -> None:
    from lamina.cli.quantize import CALIBRATION_TOKENS

    assert tuple(Scheme) == SCHEMES
    assert CALIBRATION_TOKENS == DEFAULT_CALIBRATION_TOKENS


def test_errors_are_a_table_of_layers_and_sizes_a_line(tiny_folder: Path, tmp_path: Path) -> None:
    done = command(tiny_folder, "--scheme", "w4a16", "--group-size", 32, "-o", tmp_path / "new")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("layer"))
    columns = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert lines[head].split() == ["layer", *columns]
    for layer, line in enumerate(lines[head + 1 : head + 3]):
        number, *cells = line.split()
        assert number == str(layer)
        assert [5 < float(cell.removesuffix("%")) < 15 for cell in cells] == [True] * 7
    assert lines[-2] == "left as they are: the embedding, norms, biases, lm_head"
    assert lines[-1].startswith("0.5 MB became ")
    assert lines[-1].endswith(f": {tmp_path / 'new'}")


def test_as_json_it_tells_the_same_in_figures(tiny_text_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("plain words " * 50)
    given = ("--gptq", "--calibration", text, "--calibration-tokens", 100, "--ignore", "*.1.mlp.*", "--json")
    done = command(tiny_text_folder, "--scheme", "int8", "-o", tmp_path / "new", *given)
    facts = json.loads(done.stdout)
    assert facts["folder"] == str(tmp_path / "new")
    assert facts["bytes_after"] < facts["bytes_before"]
    assert len(facts["errors"]) == 11
    assert all(0 < error["output_rms"] < error["relative_rms"] for error in facts["errors"].values())
    assert len(facts["ignored"]) == 4


def test_perplexity_of_a_text_is_told_of_both(tiny_text_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the hello of the world " * 5)
    given = ("--scheme", "w4a16", "--group-size", 32, "-o", tmp_path / "new", "--device", "cpu")
    done = command(tiny_text_folder, *given, "--perplexity", text, "--json")
    measured = json.loads(done.stdout)["perplexity"]
    assert measured["before"]["num_tokens"] == measured["after"]["num_tokens"] > 50
    assert measured["before"]["value"] != measured["after"]["value"]
    assert 0.7 < measured["after"]["value"] / measured["before"]["value"] < 1.4
    text.unlink()
    done = command(tiny_text_folder, *given, "--overwrite", "--perplexity", text)
    assert isinstance(done.exception, LoadError)
    assert "text cannot be read" in str(done.exception)


def test_what_is_refused_is_one_line_and_2(tiny_folder: Path, tmp_path: Path) -> None:
    code, out, errors = run(
        "quantize", tiny_folder, "--scheme", "fp8", "--asymmetric", "-o", tmp_path / "new"
    )
    assert (code, out) == (2, b"")
    assert errors.splitlines()[-1].startswith("lamina: --asymmetric is given and --scheme is 'fp8'")
    assert [*tmp_path.iterdir()] == []


@pytest.fixture(scope="module")
def larger_folder(make_tiny_folder: Callable[..., Path]) -> Path:
    """Enough weights for a second of work."""
    return make_tiny_folder(hidden_size=512, intermediate_size=4096, num_hidden_layers=4)


@pytest.mark.parametrize(
    "number, seed",
    [
        *((signal.SIGINT, seed) for seed in range(4)),
        (signal.SIGTERM, 0),
        (signal.SIGTERM, 1),
        (signal.SIGHUP, 2),
    ],
)
def test_a_signal_leaves_a_whole_folder_or_none(
    larger_folder: Path, tmp_path: Path, number: int, seed: int
) -> None:
    code = 128 + number
    process = start("quantize", larger_folder, "--scheme", "fp8", "-o", tmp_path / "new")
    while process.poll() is None and not any(tmp_path.iterdir()):
        time.sleep(0.01)
    time.sleep(random.Random(seed).uniform(0, 0.7))
    process.send_signal(number)
    _, errors = process.communicate(timeout=240)
    assert b"Traceback" not in errors
    assert process.returncode in (0, code, -number), errors
    left = {path.name for path in tmp_path.iterdir()}
    assert left == ({"new"} if process.returncode == 0 else left & {"new"})
    if left:
        check_whole(tmp_path / "new")
    elif process.returncode == code:
        assert b"interrupted: nothing half-made is left at" in errors


def check_whole(folder: Path) -> None:
    assert "quantization_config" in json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = [*file.keys()]
        assert sum(name.endswith(".weight_scale") for name in names) == 28
        assert all(bool(file.get_tensor(name).to(torch.float32).isfinite().all()) for name in names)


def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(larger_folder: Path, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))

    code, _, errors = run(
        *("quantize", larger_folder, "--scheme", "fp8", "-o", tmp_path / "new"), preexec_fn=limit
    )
    assert code == 2
    assert "model.safetensors cannot be written: File too large; make room, or write elsewhere" in errors
    assert [*tmp_path.iterdir()] == []
