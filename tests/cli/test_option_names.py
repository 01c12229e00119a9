"""Errors of the library name the options of the command that was called."""

from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from lamina.cli import app
from lamina.cli.option_names import in_options

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "command, text, expected",
    [
        (
            "quantize",
            "symmetric is False and scheme is 'int8'",
            "--asymmetric is given and --scheme is 'int8'",
        ),
        ("quantize", "use scheme='w4a16', or group_size=-1", "use --scheme w4a16, or --group-size -1"),
        (
            "quantize",
            "gptq is True and calibration is None",
            "--gptq is given and --calibration is not given",
        ),
        ("quantize", "leave it out, or use gptq=True", "leave it out, or use --gptq"),
        ("quantize", "output is new, which holds files", "--output is new, which holds files"),
        ("quantize", "ignore has 'x'; ignore the module", "--ignore has 'x'; ignore the module"),
        ("quantize", "output is /a/gptq=True/b", "--output is /a/gptq=True/b"),
        ("generate", "compile is False; wanted True", "--no-compile is given; wanted True"),
        ("generate", "with compile=False it runs as it is", "with --no-compile it runs as it is"),
        ("generate", "use quantization=None or device='cpu'", "use no --quantization or --device cpu"),
        ("generate", "the model is small, and dtype is 3", "the model is small, and --dtype is 3"),
        ("generate", "lower max_model_len.", "lower --max-model-len."),
        ("generate", "max_position_embeddings is 5", "max_position_embeddings is 5"),
        ("generate", "SamplingParams(max_tokens=3)", "SamplingParams(max_tokens=3)"),
        ("cache", "group_size is 3", "group_size is 3"),
    ],
)
def test_settings_are_told_as_options(command: str, text: str, expected: str) -> None:
    assert in_options(text, COMMANDS[command].params) == expected


def test_every_option_is_known_by_the_name_that_the_library_has_for_it() -> None:
    for command in COMMANDS.values():
        for option in command.params:
            if option.param_type_name == "option" and "_" in option.name and option.name != "as_json":
                told = in_options(f"wanted {option.name}", command.params)
                assert told.removeprefix("wanted ") in (*option.opts, *option.secondary_opts), option.name


@pytest.mark.parametrize(
    "given, said",
    [
        (["--scheme", "w4a16", "--group-size", "48"], "--group-size is 48; wanted one of 32, 64, 128, -1"),
        (["--scheme", "fp8", "--group-size", "32"], "--group-size is 32 and --scheme is 'fp8'"),
        (["--scheme", "int8", "--asymmetric"], "zero points are of --scheme w4a16 alone"),
        (["--scheme", "int8", "--gptq"], "--gptq is given and --calibration is not given"),
        (["--scheme", "int8", "--calibration", "x"], "leave it out, or use --gptq"),
        (["--scheme", "int8", "--ignore", "zzz"], "--ignore has 'zzz'"),
        (["--scheme", "int8", "--ignore", "*q_proj"], "--ignore leaves model.layers.0.self_attn.q_proj of"),
        (["--scheme", "w4a16", "--group-size", "128"], "use --group-size 64 or --group-size 32 or"),
    ],
)
def test_quantize_names_what_was_given(
    tiny_folder: Path, tmp_path: Path, given: list[str], said: str
) -> None:
    arguments = ["quantize", str(tiny_folder), "-o", str(tmp_path / "new"), *given]
    done = CliRunner().invoke(app, arguments)
    assert said in str(done.exception)


def test_quantize_says_how_files_are_replaced(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["quantize", str(tiny_folder), "--scheme", "fp8", "-o", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert str(done.exception).startswith("--output is ")
    assert str(done.exception).endswith("wanted an empty folder, or --overwrite")
    done = CliRunner().invoke(app, [*arguments, "--overwrite"])
    assert "and --overwrite is given, but it holds other things" in str(done.exception)
