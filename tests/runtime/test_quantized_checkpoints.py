"""Checkpoints that are quantized already, served: answers, memory, what is said, and what is refused."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from lamina import ConfigError, Runtime, SamplingParams, UnsupportedError
from lamina.cli import app
from lamina.common.progress import say_nothing
from lamina.models.quantization import w4a16
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.startup.loader import read_weights, resolve_runtime, sizing
from lamina.runtime.verify import verify

from ..models.checkpoints.quantized import writers
from ..models.checkpoints.quantized.writers import Dialect, ct, weights_of

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
KEPT = "in four bits a weight, a scale and a zero for 32 columns"
PROMPTS = [[5], [1, 2, 3], list(range(40, 70))]


def packed(*ignore: str) -> Dialect:
    """Four bits with zero points, but for modules whose names end so."""
    write = partial(writers.ct_packed, group=32, sym=False)
    weights = weights_of(4, "int", "group", group_size=32, symmetric=False)
    dialect = ct("pack-quantized", weights, write, "w4a16")
    names = ("lm_head", *ignore)
    config = dialect.config | {"ignore": [f"re:.*{name}" for name in names]}
    return Dialect(config=config, write=write, scheme="w4a16", dense=names)


def float8(**more: Any) -> Dialect:
    write = partial(writers.float8, by="channel")
    return Dialect(config={"quant_method": "fbgemm_fp8", **more}, write=write, scheme="fp8")


@pytest.fixture(scope="module")
def save(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Dialect], tuple[Path, Path]]:
    """save(dialect) -> a quantized checkpoint, and a dense one of the weights that it means."""
    return lambda dialect: writers.save(tmp_path_factory.mktemp("quantized"), tiny_folder, dialect)


def answers(folder: Path, **settings: Any) -> list[tuple[int, ...]]:
    with Runtime.from_pretrained(folder, num_kv_blocks=64, dtype="float32", **settings) as runtime:
        return [tuple(output.outputs[0].token_ids) for output in runtime.generate(PROMPTS, GREEDY)]


def test_answers_are_those_of_the_weights_meant_eager_and_compiled(
    save: Callable[..., tuple[Path, Path]], compile_cache: Path
) -> None:
    folder, dense = save(packed("down_proj"))
    expected = answers(dense, compile=False)
    assert answers(folder, compile=False) == expected
    assert answers(folder, compile=True, cache_dir=compile_cache) == expected


def test_memory_is_exact_before_and_what_is_kept_is_said(
    save: Callable[..., tuple[Path, Path]], said: Callable[[], list[str]]
) -> None:
    folder, _ = save(packed("down_proj"))
    told = sizing(RuntimeConfig(model=folder, dtype="bfloat16"), say_nothing).weight_bytes
    with Runtime.from_pretrained(folder, num_kv_blocks=64, dtype="bfloat16", compile=False) as runtime:
        stats, explained = runtime.stats()["quantization"], runtime.explain()
        loaded = runtime._loaded.weights.by_name
        assert told == sum({one.data_ptr(): one.nbytes for one in loaded.values()}.values())
    assert stats["name"] == "compressed-tensors"
    assert set(stats["tensors"]) == {f"layers.{i}.{name}" for i in (0, 1) for name in ("qkv", "o", "gate_up")}
    assert 0 < stats["total"]["relative_rms"] < 2**-7, "scales and zero points, rounded to bfloat16"
    wanted = (
        "quantization w4a16: 6 projections in four bits a weight, a scale and a zero for 32 columns, off by"
    )
    assert wanted in explained
    assert "  layers.0.qkv [128, 64] w4a16: numbers uint8 [128, 32], scale bfloat16 [128, 2]" in explained
    assert all("; scales from " in line for line in explained.splitlines() if line.startswith("  layers."))
    assert any(line.startswith(wanted) for line in said())


def test_commands_say_how_projections_are_kept_without_reading_them(
    save: Callable[..., tuple[Path, Path]], compile_cache: Path
) -> None:
    folder, _ = save(packed("down_proj"))
    (folder / "model.safetensors").unlink()
    sentences = [
        f"quantization w4a16: 6 projections {KEPT}",
        "quantization 3 projections in the runtime's dtype, layers.0.down, layers.1.down, lm_head",
    ]
    told = CliRunner().invoke(app, ["info", "--json", "--model", str(folder), "--dtype", "float32"])
    assert json.loads(told.stdout)["quantization"] == sentences
    options = ["--model", str(folder), "--dtype", "float32", "--cache-dir", str(compile_cache)]
    told = CliRunner().invoke(app, ["explain", *options])
    sizes = {"qkv": (128, 64), "o": (64, 64), "gate_up": (256, 64)}
    lines = [
        f"  layers.0.{name} to layers.1.{name} [{rows}, {columns}] w4a16: "
        f"numbers uint8 [{rows}, {columns // 2}], scale float32 [{rows}, {columns // 32}], "
        f"zero float32 [{rows}, {columns // 32}]"
        for name, (rows, columns) in sizes.items()
    ]
    assert told.stdout.endswith("\n".join([*sentences, *lines, ""]))
    told = CliRunner().invoke(app, ["explain", "--json", *options])
    facts = json.loads(told.stdout)["quantization"]
    assert facts["name"] == "compressed-tensors"
    assert facts["projections"]["layers.1.o"]["parts"]["scale"] == "float32 [64, 2]"
    assert facts["projections"]["layers.1.o"]["error"] is None


def test_explain_reads_the_weights_where_their_errors_are_asked_for(
    save: Callable[..., tuple[Path, Path]], compile_cache: Path
) -> None:
    folder, _ = save(packed("down_proj"))
    options = ["--errors", "--model", str(folder), "--dtype", "bfloat16", "--cache-dir", str(compile_cache)]
    told = CliRunner().invoke(app, ["explain", *options])
    lines = [line for line in told.stdout.splitlines() if line.startswith("  layers.")]
    assert [line.split()[0] for line in lines] == [
        f"layers.{layer}.{name}" for layer in (0, 1) for name in ("qkv", "o", "gate_up")
    ]
    assert all("; scales from " in line and "; off by " in line for line in lines)
    told = CliRunner().invoke(app, ["explain", "--json", *options])
    kept = json.loads(told.stdout)["quantization"]["projections"]
    assert all(0 < one["error"]["relative_rms"] < 2**-7 for one in kept.values())
    assert all(0 < one["scales"][0] < one["scales"][1] for one in kept.values())


def plan_factors(folder: Path, cache: Path, **settings: Any) -> Any:
    config = RuntimeConfig(model=folder, dtype="float32", cache_dir=cache, load_format="dummy", **settings)
    return resolve_runtime(config, say_nothing).plan_factors()


def test_plans_of_other_schemes_and_of_other_exempt_modules_are_others(
    save: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    folders = [save(dialect)[0] for dialect in (packed(), packed("down_proj"), packed("o_proj"))]
    folders += [save(float8(activation_scale_ub=bound))[0] for bound in (None, 0.5, 1.0)]
    factors = [json.dumps(plan_factors(folder, tmp_path), sort_keys=True, default=str) for folder in folders]
    assert len(set(factors)) == len(folders)
    again, _ = save(packed("o_proj"))
    assert json.dumps(plan_factors(again, tmp_path), sort_keys=True, default=str) == factors[2]


def test_verify_compares_with_the_dequantized_model(
    save: Callable[..., tuple[Path, Path]], compile_cache: Path
) -> None:
    folder, _ = save(packed())
    config = RuntimeConfig(model=folder, dtype="float32", num_kv_blocks=64, cache_dir=compile_cache)
    found = verify(config, [PROMPTS[2]], 1, say_nothing)
    assert found.is_right
    assert found.reference == "transformers"
    assert all(row.compiled is not None and row.compiled.rms < 1e-5 for row in found.layers)
    assert found.quantization == (f"quantization w4a16: 8 projections {KEPT}, as the checkpoint has them",)
    assert set(found.projections) == set(config_projections())
    qkv = found.projections["layers.0.qkv"]
    assert (qkv.scheme, qkv.shape, qkv.parts[""]) == ("w4a16", (128, 64), "uint8 [128, 32]")
    assert qkv.scales is not None
    assert 0 < qkv.scales[0] < qkv.scales[1] < 1
    assert qkv.error is not None
    assert qkv.error.max_error == 0


def config_projections() -> list[str]:
    return [f"layers.{i}.{name}" for i in (0, 1) for name in ("qkv", "o", "gate_up", "down")]


@pytest.mark.parametrize("scheme", ["fp8", "fp8_block", "w4a16", "w8a16", "int8"])
def test_a_dense_checkpoint_may_be_quantized_as_it_is_read(tiny_folder: Path, scheme: str) -> None:
    settings: dict[str, Any] = {"quantization": scheme, "dtype": "float32", "compile": False}
    with Runtime.from_pretrained(tiny_folder, num_kv_blocks=64, **settings) as runtime:
        (output,) = runtime.generate([PROMPTS[1]], GREEDY)
        stats = runtime.stats()["quantization"]
    assert len(output.outputs[0].token_ids) == 16
    assert set(stats["tensors"]) == {*config_projections(), *(["lm_head"] if scheme == "int8" else [])}
    most = {"int8": 0.01, "w8a16": 0.01, "w4a16": 0.12}.get(scheme, 0.03)
    assert 0.001 < stats["total"]["relative_rms"] < most


def test_weights_made_up_are_quantized_as_the_config_says(save: Callable[..., tuple[Path, Path]]) -> None:
    folder, _ = save(packed("down_proj"))
    settings: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "compile": False}
    with Runtime.from_pretrained(folder, num_kv_blocks=64, **settings) as runtime:
        loaded = runtime._loaded.weights.by_name
        assert loaded["layers.0.qkv"].dtype == torch.uint8
        assert loaded["layers.0.qkv%zero"].dtype == loaded["layers.0.down"].dtype == torch.bfloat16


@pytest.mark.parametrize("desc_act", [False, True])
def test_weights_made_up_may_have_an_order_of_columns(
    make_tiny_folder: Callable[..., Path], tmp_path: Path, desc_act: bool
) -> None:
    config = json.loads((make_tiny_folder() / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "group_size": 32, "desc_act": desc_act}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = RuntimeConfig(model=tmp_path, load_format="dummy", dtype="float32")
    weights = read_weights(resolve_runtime(made, say_nothing), say_nothing)
    assert ("layers.0.qkv%order" in weights.by_name) is desc_act
    assert weights.total_error().relative_rms < 0.12


def test_a_setting_that_is_not_what_the_checkpoint_is_is_refused(
    save: Callable[..., tuple[Path, Path]],
) -> None:
    folder, _ = save(packed())
    with pytest.raises(UnsupportedError, match=r"quantization is 'fp8', and the .* quantized already"):
        Runtime.from_pretrained(folder, quantization="fp8", compile=False)
    config = RuntimeConfig(model=folder, quantization="w4a16", load_format="dummy")
    assert resolve_runtime(config, say_nothing).schemes.name == "compressed-tensors"
    with pytest.raises(ConfigError, match="quantization is 'gptq'; wanted None or q8 or q4 or fp8"):
        RuntimeConfig(model=folder, quantization="gptq")


def test_what_is_dequantized_or_done_otherwise_is_said(
    save: Callable[..., tuple[Path, Path]], said: Callable[[], list[str]]
) -> None:
    static = {"input_scale": torch.tensor(0.03)}
    write = partial(writers.float8, by="tensor", like=lambda scales: scales.reshape(()), others=static)
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    powers = partial(writers.float8, by="block", scale="weight_scale_inv", like=writers.as_exponents)
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    nf4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    for dialect in (
        Dialect(config=config, write=write, scheme="fp8"),
        Dialect(config=blocks, write=powers, scheme="fp8_block"),
        Dialect(config=nf4, write=partial(writers.nf4, nested=True), scheme=None),
    ):
        with Runtime.from_pretrained(save(dialect)[0], num_kv_blocks=64, compile=False):
            pass
    lines = said()
    assert "quantization fp8: activations are quantized by scales of their own in place of the" in str(lines)
    assert "scales of activations are not rounded up to powers of two, as scale_fmt 'ue8m0' has" in str(lines)
    assert "14 modules in bitsandbytes nf4 are dequantized into the runtime's dtype as they are read" in str(
        lines
    )


@pytest.mark.parametrize("quantization", [None, "w8a16"])
def test_weights_in_the_layout_of_a_gpu_answer_and_are_restored_alike(
    save: Callable[..., tuple[Path, Path]],
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    quantization: str | None,
) -> None:
    """As on a GPU whose kernel reads shuffled weights, multiplied here by the op's other providers."""
    folder = tiny_folder if quantization else save(packed())[0]
    settings: dict[str, Any] = {"quantization": quantization}
    resolved = resolve_runtime(RuntimeConfig(model=folder, dtype="float32", **settings), say_nothing)
    by_rows = read_weights(resolved, say_nothing).by_name
    restored, expected = resolved.schemes.restored(by_rows), answers(folder, compile=False, **settings)
    monkeypatch.setattr(w4a16, "is_kept_shuffled", lambda n, k, *rest: n % 64 == k % 64 == 0)
    shuffled = read_weights(resolved, say_nothing).by_name
    assert not torch.equal(shuffled["layers.0.qkv"], by_rows["layers.0.qkv"])
    assert answers(folder, compile=False, **settings) == expected
    again = resolved.schemes.restored(shuffled)
    assert all(torch.equal(again[name], rows) for name, rows in restored.items())


def test_a_model_may_hold_every_scheme_at_once(
    tiny_folder: Path, tmp_path: Path, compile_cache: Path
) -> None:
    """Of four groups, each with a format of its own, in a file of mixed precision."""
    token = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    four_bits, whole = weights_of(4, "int", "group", group_size=32), weights_of(8, "int", "channel")
    float_ = weights_of(8, "float", "channel")
    kinds: dict[str, tuple[str, dict[str, Any], Any, Callable[..., writers.Module]]] = {
        "o_proj": ("pack-quantized", four_bits, None, partial(writers.ct_packed, group=32, sym=True)),
        "up_proj|gate_proj": ("float-quantized", float_, token, partial(writers.float8, by="channel")),
        "[qkv]_proj": (
            "int-quantized",
            whole,
            token | {"type": "int"},
            partial(writers.ct_int8, by_row=True),
        ),
        "down_proj": ("float-quantized", float_, None, partial(writers.float8, by="channel")),
    }
    held, stored, meant = load_file(tiny_folder / "model.safetensors"), {}, {}
    for name, value in held.items():
        module = name.removesuffix(".weight")
        write = next((one[-1] for kind, one in kinds.items() if re.search(rf"\.({kind})$", module)), None)
        if write is None:
            stored[name] = meant[name] = value
            continue
        tensors, weights = write(value.numpy())
        stored |= {f"{module}.{part}": one.contiguous() for part, one in tensors.items()}
        meant[name] = torch.from_numpy(weights)
    groups = {
        kind: {"targets": [f"re:.*\\.({kind})$"], "weights": own, "input_activations": inputs, "format": form}
        for kind, (form, own, inputs, _) in kinds.items()
    }
    config = json.loads((tiny_folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    config["quantization_config"] |= {"config_groups": groups, "ignore": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(stored, tmp_path / "model.safetensors")
    resolved = resolve_runtime(RuntimeConfig(model=tmp_path, dtype="float32"), say_nothing)
    restored = resolved.schemes.restored(read_weights(resolved, say_nothing).by_name)
    assert all(torch.equal(restored[name], one) for name, one in meant.items())
    names = {name: scheme.name for name, scheme in resolved.schemes.schemes.items() if ".0." in name}
    expected = {"layers.0.qkv": "int8", "layers.0.o": "w4a16", "layers.0.gate_up": "fp8"}
    assert names == expected
    assert answers(tmp_path, compile=False) == answers(tmp_path, compile=True, cache_dir=compile_cache)
