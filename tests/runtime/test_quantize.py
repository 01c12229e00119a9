"""`lamina.quantize`: from what a user calls a model to a folder, and all that is refused on the way."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lamina
from lamina.common.errors import ConfigError, LoadError, StoreError, UnsupportedError
from lamina.common.store import Store
from lamina.models.checkpoints.source import resolve_source

from ..models.checkpoints.test_gguf import write_gguf
from ..models.quantizing.literal_reader import dequantized

TEXT = "A text of plain words, which a model of few numbers reads once. " * 40


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.txt"
    path.write_text(TEXT)
    return path


def with_tensors(folder: Path, to: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a model whose tensors a function has changed."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def test_it_tells_what_it_wrote_and_how_far_it_has_come(tiny_text_folder: Path, tmp_path: Path) -> None:
    told: list[tuple[str, float, str]] = []
    written = lamina.quantize(
        str(tiny_text_folder),
        tmp_path / "new",
        scheme="w4a16",
        group_size=32,
        progress=lambda *each: told.append(each),
    )
    assert written.folder == tmp_path / "new"
    assert [name for stage, _, name in told if stage == "quantize"] == [*written.errors]
    fractions = [fraction for stage, fraction, _ in told if stage == "quantize"]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert written.bytes_after < written.bytes_before
    assert written.ignored == ("lm_head",)
    assert all(0.05 < error.relative_rms < 0.15 for error in written.errors.values())
    assert all(error.output_rms is None for error in written.errors.values())


@pytest.mark.parametrize(
    "recipe",
    [
        {"scheme": "fp8"},
        {"scheme": "int8"},
        {"scheme": "w4a16", "group_size": 32},
        {"scheme": "w4a16", "group_size": -1, "symmetric": False},
    ],
    ids=str,
)
def test_by_gptq_outputs_are_nearer_and_the_folder_is_as_any_other(
    tiny_text_folder: Path, tmp_path: Path, calibration: Path, recipe: dict[str, Any]
) -> None:
    nearest = lamina.quantize(tiny_text_folder, tmp_path / "nearest", **recipe)
    written = lamina.quantize(
        tiny_text_folder, tmp_path / "gptq", gptq=True, calibration=calibration, device="cpu", **recipe
    )
    assert written.errors.keys() == nearest.errors.keys()
    for name, error in written.errors.items():
        assert error.output_rms is not None
        assert error.output_rms < nearest.errors[name].relative_rms
        assert error.relative_rms >= nearest.errors[name].relative_rms
    assert names_of(tmp_path / "gptq") == names_of(tmp_path / "nearest")
    before, after = load_file(tiny_text_folder / "model.safetensors"), dequantized(tmp_path / "gptq")
    for name, error in written.errors.items():
        off = (after[f"{name}.weight"] - before[f"{name}.weight"]).norm() / before[f"{name}.weight"].norm()
        assert float(off) == pytest.approx(error.relative_rms, rel=1e-4)


def names_of(folder: Path) -> dict[str, Any]:
    tensors = load_file(folder / "model.safetensors")
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def test_a_gguf_file_is_quantized_as_the_model_that_it_holds(
    make_tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "model.gguf", make_tiny_folder())
    lamina.quantize(file, tmp_path / "new", scheme="int8", cache_dir=tmp_path / "cache")
    folder = resolve_source(file, store=Store(tmp_path / "cache"))
    lamina.quantize(folder, tmp_path / "again", scheme="int8")
    one, other = dequantized(tmp_path / "new"), dequantized(tmp_path / "again")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_the_head_may_be_named_though_it_stays_anyway(
    make_tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    for tied in (False, True):
        folder = make_tiny_folder(tie_word_embeddings=tied)
        written = lamina.quantize(folder, tmp_path / str(tied), scheme="fp8", ignore=["lm_head"])
        assert written.ignored == ("lm_head",)
        assert len(written.errors) == 14


def test_a_name_that_is_empty_is_no_folder(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="output is ''; wanted the folder to write"):
        lamina.quantize(tiny_folder, "", scheme="fp8", overwrite=True)
    with pytest.raises(LoadError, match="'' does not exist; wanted a model folder"):
        lamina.quantize("", "anywhere", scheme="fp8")


def test_modules_that_are_ignored_stay_and_are_listed(tiny_folder: Path, tmp_path: Path) -> None:
    written = lamina.quantize(
        tiny_folder,
        tmp_path / "new",
        scheme="fp8",
        ignore=["*.down_proj", r"re:model\.layers\.0\.self_attn\.[qkv]_proj"],
    )
    stay = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    stay += [f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)]
    assert set(written.ignored) == {"lm_head", *stay}
    assert not written.errors.keys() & set(stay)
    config = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == list(written.ignored)
    before, after = load_file(tiny_folder / "model.safetensors"), dequantized(tmp_path / "new")
    assert all(torch.equal(before[f"{name}.weight"], after[f"{name}.weight"]) for name in stay)


def test_groups_that_nobody_chose_are_the_largest_that_fit_every_projection(
    tiny_folder: Path, tmp_path: Path
) -> None:
    lamina.quantize(tiny_folder, tmp_path / "new", scheme="w4a16")
    config = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    (groups,) = config["config_groups"].values()
    assert groups["weights"]["group_size"] == 64  # as all its projections have 64 columns, or 128
    lamina.quantize(tiny_folder, tmp_path / "asked", scheme="w4a16", group_size=64)
    written, asked = (load_file(tmp_path / name / "model.safetensors") for name in ("new", "asked"))
    assert written.keys() == asked.keys()
    assert all(torch.equal(written[name], asked[name]) for name in written)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"scheme": "int4"}, "scheme is 'int4'; wanted one of fp8, int8, w4a16"),
        ({"scheme": None}, "scheme is None"),
        ({"scheme": "w4a16", "group_size": 16}, "group_size is 16; wanted one of 32, 64, 128, -1"),
        ({"scheme": "w4a16", "group_size": True}, "group_size is True"),
        ({"scheme": "w4a16", "group_size": 32.5}, "group_size is 32.5"),
        (
            {"scheme": "fp8", "group_size": 32},
            "group_size is 32 and scheme is 'fp8', which",
        ),
        ({"scheme": "int8", "symmetric": False}, "symmetric is False and scheme is 'int8'"),
        (
            {"scheme": "w4a16", "group_size": 128},
            r"is 128, which does not divide the 64 columns of .*q_proj; use group_",
        ),
        ({"scheme": "fp8", "ignore": "lm_head"}, r"ignore is 'lm_head'; wanted a list"),
        ({"scheme": "fp8", "ignore": ["*.gate"]}, r"ignore has '\*.gate', which no projection is called"),
        ({"scheme": "fp8", "ignore": ["re:("]}, r"ignore has 're:\(', which is no regular expression"),
        ({"scheme": "fp8", "ignore": [3]}, r"ignore has 3"),
        ({"scheme": "fp8", "ignore": [""]}, r"ignore has ''"),
        ({"scheme": "fp8", "ignore": ["*"]}, "ignore leaves every projection as it is"),
        (
            {"scheme": "fp8", "ignore": ["*.k_proj"]},
            r"leaves .*0.self_attn.k_proj of .* multiplied as one",
        ),
        ({"scheme": "fp8", "gptq": True}, "gptq is True and calibration is None"),
        ({"scheme": "fp8", "calibration": "a.txt"}, "calibration is 'a.txt' and gptq is False"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_before_anything_is_written(
    tiny_folder: Path, tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        lamina.quantize(tiny_folder, tmp_path / "new", **settings)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("text", "settings", "error", "why"),
    [
        (None, {}, LoadError, "cannot be read: No such file"),
        (b"\xff\xfe", {}, LoadError, "is no UTF-8 text"),
        (b"", {}, LoadError, "the text is 0 tokens; wanted at least 2"),
        (b"enough", {"calibration_tokens": 1}, ConfigError, "number of tokens is 1; wanted an integer >= 2"),
        (b"enough", {"calibration_tokens": True}, ConfigError, "number of tokens is True"),
        (b"enough", {"device": "tpu"}, ConfigError, "device is 'tpu'"),
    ],
)
def test_a_calibration_that_cannot_be_had_is_refused(
    tiny_text_folder: Path,
    tmp_path: Path,
    text: bytes | None,
    settings: dict[str, Any],
    error: type[Exception],
    why: str,
) -> None:
    path = tmp_path / "text"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(error, match=why):
        lamina.quantize(
            tiny_text_folder, tmp_path / "new", scheme="int8", gptq=True, calibration=path, **settings
        )
    assert not (tmp_path / "new").exists()


def test_gptq_of_a_model_without_a_tokenizer_is_refused(
    tiny_folder: Path, tmp_path: Path, calibration: Path
) -> None:
    with pytest.raises(LoadError, match="has no tokenizer"):
        lamina.quantize(tiny_folder, tmp_path / "new", scheme="int8", gptq=True, calibration=calibration)


def test_a_model_that_is_quantized_already_is_refused_by_how(tiny_folder: Path, tmp_path: Path) -> None:
    lamina.quantize(tiny_folder, tmp_path / "once", scheme="int8")
    with pytest.raises(UnsupportedError, match=r"once is quantized already .*'compressed-tensors'"):
        lamina.quantize(tmp_path / "once", tmp_path / "twice", scheme="fp8")
    model = shutil.copytree(tiny_folder, tmp_path / "modelopt")
    (model / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match=r"quantized already \(hf_quant_config.json\)"):
        lamina.quantize(model, tmp_path / "twice", scheme="fp8")
    assert not (tmp_path / "twice").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("gptq", [False, True])
def test_weights_that_are_not_finite_are_named(
    tiny_text_folder: Path, tmp_path: Path, calibration: Path, value: float, gptq: bool
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(tensors: dict[str, Any]) -> None:
        tensors[name][3, 5] = value

    model = with_tensors(tiny_text_folder, tmp_path / "model", spoil)
    given = {"gptq": True, "calibration": calibration} if gptq else {}
    with pytest.raises(LoadError, match=rf"{name} in .* not finite"):
        lamina.quantize(model, tmp_path / "new", scheme="int8", **given)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "calibration.txt"}


def test_weights_of_eight_bits_without_a_word_of_how_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def narrow(tensors: dict[str, Any]) -> None:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    model = with_tensors(tiny_folder, tmp_path / "model", narrow)
    with pytest.raises(LoadError, match=rf"{name} .* has dtype F8_E4M3; wanted one of"):
        lamina.quantize(model, tmp_path / "new", scheme="int8")


def test_rows_of_zeros_and_of_the_smallest_numbers_stay_what_they_are(
    tiny_folder: Path, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def shrink(tensors: dict[str, Any]) -> None:
        tensors[name][:4] = 0.0
        tensors[name][4:8] = 1e-42
        tensors[name][8:12] = 3e38

    model = with_tensors(tiny_folder, tmp_path / "model", shrink)
    for settings in ({"scheme": "fp8"}, {"scheme": "int8"}, {"scheme": "w4a16", "group_size": 32}):
        lamina.quantize(model, tmp_path / str(settings["scheme"]), **settings)  # type: ignore[arg-type]
        weight = dequantized(tmp_path / str(settings["scheme"]))[name]
        assert bool((weight[:4] == 0).all())
        assert float(weight[4:8].abs().max()) < 1e-37
        assert float(weight[8:12].min()) > 2.7e38


def test_a_folder_inside_of_the_model_and_one_with_files_are_refused(
    tiny_folder: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    before = {path.name for path in model.iterdir()}
    for output in (model / "fp8", model, tmp_path):
        with pytest.raises(ConfigError, match=r"inside of the model|holds the model"):
            lamina.quantize(model, output, scheme="fp8", overwrite=True)
    lamina.quantize(model, tmp_path / "new", scheme="fp8")
    with pytest.raises(ConfigError, match="holds files"):
        lamina.quantize(model, tmp_path / "new", scheme="int8")
    lamina.quantize(model, tmp_path / "new", scheme="int8", overwrite=True)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"
    assert {path.name for path in model.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"model", "new"}


def test_an_interrupt_at_any_moment_leaves_nothing(tiny_text_folder: Path, tmp_path: Path) -> None:
    """At each of the moments at which it tells how far it is, of which the last comes before it is whole."""
    num_moments = 14
    for moment in range(num_moments):
        left = [moment]

        def stop(stage: str, fraction: float, detail: str, left: list[int] = left) -> None:
            if stage == "quantize" and not left[0]:
                raise KeyboardInterrupt
            left[0] -= stage == "quantize"

        with pytest.raises(KeyboardInterrupt):
            lamina.quantize(tiny_text_folder, tmp_path / "new", scheme="int8", progress=stop)
        assert [*tmp_path.iterdir()] == []


def test_a_place_that_cannot_be_written_is_named(tiny_folder: Path) -> None:
    with pytest.raises(StoreError, match="/proc/lamina/new cannot be written"):
        lamina.quantize(tiny_folder, "/proc/lamina/new", scheme="fp8")
