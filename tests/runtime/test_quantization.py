"""int8 through the whole runtime: the tokens of a dense model with the same values, however it is served."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamina import SamplingParams
from lamina.custom_ops._shared import registry
from lamina.models.config import read_model_config
from lamina.models.registry import find_model
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.startup.memory_report import size

from .startup.resolving import resolve_alone

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[5], [1, 2, 3], list(range(40, 70)), [300, 3] * 20]
NEAR_TIE = 1e-4


@pytest.fixture(scope="module")
def dequantized(tiny_folder, tmp_path_factory):
    """A dense copy of TINY whose projections have the values that the bytes stand for."""
    folder = tmp_path_factory.mktemp("dequantized")
    held = load_file(tiny_folder / "model.safetensors")
    for name, tensor in held.items():
        if tensor.dim() == 2 and "embed" not in name:
            scale = tensor.abs().amax(dim=1, keepdim=True) / 127
            held[name] = (tensor / scale).round() * scale
    save_file(held, folder / "model.safetensors")
    (folder / "config.json").write_text((tiny_folder / "config.json").read_text())
    return folder


def together(runtime):
    return [list(output.outputs[0].token_ids) for output in runtime.generate(PROMPTS, GREEDY)]


def alone(runtime):
    return [list(runtime.generate([prompt], GREEDY)[0].outputs[0].token_ids) for prompt in PROMPTS]


@pytest.mark.parametrize("serve", [alone, together])
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_float32_tokens_are_those_of_transformers_on_the_dequantized_weights(
    open_runtime, dequantized, tiny_reference, compile_cache, compile, serve
):
    settings = {"dtype": "float32", "quantization": "int8", "cache_dir": compile_cache}
    answers = serve(open_runtime(**settings, compile=compile))
    model = tiny_reference(dequantized)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        best = logits.max(dim=-1).values
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert ((best - chosen) < NEAR_TIE).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 4},
        {"prefill_chunk": 2},
        {"max_num_batched_tokens": 9},
        {"num_kv_blocks": 30, "block_size": 4},
    ],
    ids=str,
)
def test_requests_together_get_what_each_gets_alone(open_runtime, settings):
    wide = {"dtype": "float64", "quantization": "int8"}
    assert together(open_runtime(**wide, **settings)) == alone(open_runtime(**wide))


def test_in_exact_numerics_compiled_logits_have_the_bits_of_eager_ones(open_runtime, compile_cache):
    settings = {"dtype": "bfloat16", "numerics": "exact", "quantization": "int8"}
    eager = logits_of(open_runtime(**settings))
    compiled = logits_of(open_runtime(**settings, compile=True, cache_dir=compile_cache))
    assert len(eager) == len(compiled) > 0
    assert all(torch.equal(one, other) for one, other in zip(eager, compiled, strict=True))


def logits_of(runtime):
    """What every step samples from."""
    caught: list[torch.Tensor] = []
    runtime._loaded.runner.on_logits = lambda plan, logits: caught.append(logits.clone())
    together(runtime)
    return caught


def test_its_error_is_told_in_words_and_in_figures(open_runtime, said):
    runtime = open_runtime(quantization="int8")
    told = runtime.stats()["quantization"]
    assert told["name"] == runtime.stats()["resolved"]["quantization"] == "int8"
    assert told["tensors"].keys() == {"lm_head"} | {
        f"layers.{layer}.{name}" for layer in (0, 1) for name in ("qkv", "o", "gate_up", "down")
    }
    assert 0.001 < told["total"]["relative_rms"] < 0.01
    assert told["total"]["max_error"] == max(error["max_error"] for error in told["tensors"].values())
    (line,) = [line for line in said() if line.startswith("quantization int8: 9 projections in one byte")]
    assert line in runtime.explain()
    assert open_runtime().stats()["quantization"] is None


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("quantization", [None, "int8", "fp8", "fp8_block", "w4a16", "w8a16"])
def test_what_a_request_calls_is_there_once_an_eager_runtime_is_ready(
    open_runtime, forget_kernels, quantization, numerics
):
    forget_kernels()
    settings = {"dtype": "float32", "compile": False, "quantization": quantization, "numerics": numerics}
    runtime = open_runtime(**settings)
    loaded = registry._implementation.cache_info().misses
    together(runtime)
    assert registry._implementation.cache_info().misses == loaded


def test_sizing_counts_a_byte_a_weight(tiny_folder):
    model = read_model_config(tiny_folder)
    specs = find_model(model.architecture).parameters(model)
    projections = [spec.shape for spec in specs.values() if spec.projection]
    dense = sum(2 * torch.Size(spec.shape).numel() for spec in specs.values() if not spec.projection)
    config = RuntimeConfig(model="tiny", quantization="int8")
    fit = size(resolve_alone(config, model, torch.bfloat16, torch.device("cpu")))
    assert fit.weight_bytes == dense + sum(rows * columns + 4 * rows for rows, columns in projections)
