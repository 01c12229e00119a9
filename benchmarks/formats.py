"""Checkpoints in the formats of public tools, packed by those: logits beside what they mean, and perplexity.

    pip install gptqmodel==7.7.0 bitsandbytes==0.50.2 nvidia-modelopt==0.47.0 compressed-tensors
    python benchmarks/formats.py --model SmolLM2-135M-Instruct.Q4_1.gguf

Weights are rounded to nearest, as tools do without a calibration; what a module means is what its tool reads
in it. All is computed in float32, so that nothing but the format is measured.
"""

import argparse
import datetime
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import perplexity
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lamina import Runtime
from lamina.common.store import Store
from lamina.models.checkpoints.source import resolve_source
from lamina.runtime.perplexity import logprobs_of, perplexity_of
from lamina.runtime.tokenization.text_windows import WINDOW

Made = tuple[dict[str, Tensor], Tensor]  # what a tool stores of a weight, and what it reads in that
GROUP = 64  # the largest that divides SmolLM2's 576 columns
E4M3 = torch.float8_e4m3fn
FEW = 256  # tokens that are compared with what transformers computes of the weights meant


@dataclass(frozen=True, kw_only=True)
class Format:
    """A config, how a weight is stored by it, and by how many columns activations are rounded to e4m3."""

    config: Mapping[str, Any]
    write: Callable[[Tensor], Made]
    activations: int | None = None  # None: not at all; 0: a token


# Weights on the grid of a scheme: what tools pack.


def grid(weight: Tensor, group: int, *, zero: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Scales in float16 [N, G], zero points [N, G], and the weight [N, K] rounded to the grid."""
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
    step = (high - low) / 15 if zero else torch.maximum(-low, high) / 7.5
    scale = torch.where(step > 0, step, 1.0).to(torch.float16).float()
    zeros = (-low / scale).round().clamp(1, 15) if zero else torch.full_like(scale, 8)
    numbers = ((groups / scale[:, :, None]).round() + zeros[:, :, None]).clamp(0, 15)
    return scale, zeros, ((numbers - zeros[:, :, None]) * scale[:, :, None]).flatten(1)


def as_linear(weight: Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    return linear


def gptq(weight: Tensor, *, sym: bool, version: int) -> Made:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    scale, zeros, rounded = grid(weight, GROUP, zero=not sym)
    rows, columns = weight.shape
    shape = {"in_features": columns, "out_features": rows}
    module = TorchLinear(**shape, bits=4, group_size=GROUP, sym=sym, desc_act=False)
    groups = torch.arange(columns, dtype=torch.int32) // GROUP
    module.pack(as_linear(rounded), scale, zeros, groups)
    if version == 1:
        convert_gptq_v2_to_v1_format_module(module, QuantizeConfig(bits=4, group_size=GROUP))
    return {name: getattr(module, name) for name in ("qweight", "qzeros", "scales", "g_idx")}, rounded


def awq(weight: Tensor) -> Made:
    from gptqmodel.nn_modules.qlinear.gemm_awq import AwqGEMMLinear

    scale, zeros, rounded = grid(weight, GROUP, zero=True)
    module = torch.nn.Module()
    module.bits, module.group_size, module.in_features = 4, GROUP, weight.shape[1]
    AwqGEMMLinear.pack(module, as_linear(rounded), scale, zeros)
    return {name: getattr(module, name) for name in ("qweight", "qzeros", "scales")}, rounded


def bitsandbytes(weight: Tensor, *, kind: str, nested: bool) -> Made:
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    parts = {f"weight.{name}": one for name, one in state.as_dict(packed=True).items()}
    return {"weight": packed, **parts}, functional.dequantize_4bit(packed, state).float()


def modelopt_fp8(weight: Tensor) -> Made:
    from modelopt.torch.quantization.qtensor import FP8QTensor

    scale = weight.abs().amax() / 448.0
    quantized, _ = FP8QTensor.quantize(weight, scale)
    meant = quantized.dequantize(dtype=torch.float32, scale=scale)
    return {"weight": quantized._quantized_data, "weight_scale": scale}, meant


def modelopt_nvfp4(weight: Tensor) -> Made:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    quantized, scale, of_all = NVFP4QTensor.quantize(weight, 16)
    given = {"scale": scale, "double_scale": of_all, "block_sizes": {-1: 16}, "fast": False}
    meant = quantized.dequantize(dtype=torch.float32, **given)
    return {"weight": quantized._quantized_data, "weight_scale": scale, "weight_scale_2": of_all}, meant


def float8(weight: Tensor, *, rows: int, columns: int, name: str) -> Made:
    """By transformers' rule: the largest of rows x columns over 448, the last ones short; 0: all of them."""
    rows, columns = rows or weight.shape[0], columns or weight.shape[1]
    bands = [band.split(columns, dim=1) for band in weight.split(rows)]
    scale = torch.stack([torch.stack([one.abs().amax() for one in band]) for band in bands]) / 448
    wide = scale.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)
    wide = wide[:, : weight.shape[1]]
    values = (weight / wide).to(E4M3)
    return {"weight": values, name: scale.reshape(()) if scale.numel() == 1 else scale}, values.float() * wide


def compressed(weight: Tensor, *, scheme: Mapping[str, Any], form: str) -> Made:
    """compressed-tensors: its formula of scales, its compressor and its way back."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    own = QuantizationScheme(**scheme)
    rows, columns = weight.shape
    weights = own.weights
    sizes = {"tensor": (rows, columns), "channel": (1, columns), "block": (128, 128)}
    row_size, column_size = sizes.get(weights.strategy, (1, weights.group_size))
    bands = [[one.aminmax() for one in band.split(column_size, dim=1)] for band in weight.split(row_size)]
    low, high = (torch.stack([torch.stack([pair[i] for pair in band]) for band in bands]) for i in (0, 1))
    of_all = generate_gparam(weight.amin(), weight.amax()) if weights.strategy == "tensor_group" else None
    given = {} if of_all is None else {"global_scale": of_all}
    scale, zero = calculate_qparams(low, high, weights, **given)
    if weights.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    state |= {f"weight_{name}": one.reshape(1) for name, one in given.items()}
    compressor = BaseCompressor.get_value_from_registry(form)
    held = compressor.compress(state, own)
    return held, compressor.decompress(dict(held), own)["weight"].float()


# The formats.


def ct(form: str, activations: int | None = None, **weights: Any) -> Format:
    common = {"symmetric": True, "dynamic": False, "group_size": None}
    scheme: dict[str, Any] = {"targets": ["Linear"], "weights": common | weights}
    if activations is not None:
        how = {"strategy": "group", "group_size": activations} if activations else {"strategy": "token"}
        scheme["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": True, **how}
    config = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    config["config_groups"] = {"group_0": scheme}
    return Format(config=config, write=partial(compressed, scheme=scheme, form=form), activations=activations)


def of_gptq(sym: bool, version: int) -> Format:
    name = "gptq" if version == 1 else "gptq_v2"
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": sym, "checkpoint_format": name}
    return Format(config=config, write=partial(gptq, sym=sym, version=version))


def of_bitsandbytes(kind: str, nested: bool) -> Format:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Format(config=config, write=partial(bitsandbytes, kind=kind, nested=nested))


def of_modelopt(algorithm: str, write: Callable[[Tensor], Made], activations: int | None) -> Format:
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    return Format(config=config, write=write, activations=activations)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
FORMATS: Mapping[str, Format] = {
    "gptq v1": of_gptq(sym=True, version=1),
    "gptq v2, zero points": of_gptq(sym=False, version=2),
    "awq gemm": Format(config=AWQ, write=awq),
    "compressed-tensors pack-quantized": ct(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP
    ),
    "compressed-tensors int-quantized": ct("int-quantized", num_bits=8, type="int", strategy="channel"),
    "compressed-tensors float-quantized, channel": ct(
        "float-quantized", 0, num_bits=8, type="float", strategy="channel"
    ),
    "compressed-tensors float-quantized, tensor": ct(
        "float-quantized", 0, num_bits=8, type="float", strategy="tensor"
    ),
    "fp8, blocks of 128 x 128": Format(
        config=BLOCKS,
        write=partial(float8, rows=128, columns=128, name="weight_scale_inv"),
        activations=128,
    ),
    "fbgemm_fp8": Format(
        config={"quant_method": "fbgemm_fp8"},
        write=partial(float8, rows=1, columns=0, name="weight_scale"),
        activations=0,
    ),
    "modelopt FP8": of_modelopt("FP8", modelopt_fp8, 0),
    "modelopt NVFP4": of_modelopt("NVFP4", modelopt_nvfp4, None),
    "compressed-tensors nvfp4-pack-quantized": ct(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    ),
    "bitsandbytes nf4": of_bitsandbytes("nf4", nested=False),
    "bitsandbytes nf4, double": of_bitsandbytes("nf4", nested=True),
    "bitsandbytes fp4": of_bitsandbytes("fp4", nested=False),
}


def main() -> None:
    """Measure, write benchmarks/results/NAME.json after each format, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a model folder, a .gguf file or a hub id")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--bfloat16", action="store_true", help="the model as it is in bfloat16, too")
    parser.add_argument("--name", default="perplexity_formats", help="name of the result file")
    options = parser.parse_args()
    folder = resolve_source(options.model, store=Store())
    windows = perplexity.read_windows(folder, options.tokens)
    exact = perplexity.by_transformers(folder, "float32", windows)
    rows: list[dict[str, Any]] = [row("transformers float32", exact, exact)]
    if options.bfloat16:
        plain = perplexity.by_lamina(folder, {"dtype": "bfloat16"}, windows)
        rows.append(row("lamina bfloat16", plain, exact))
    for name in options.formats:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch:
            rows.append(measured(name, folder, Path(scratch), windows, exact))
        print(f"{rows[-1]} in {time.perf_counter() - started:.0f} s", file=sys.stderr)
        document = {
            "model": Path(options.model).name,
            "num_tokens": len(exact),
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["benchmarks/formats.py", *sys.argv[1:]]),
            "torch": torch.__version__,
            "results": rows,
        }
        (perplexity.RESULTS / f"{options.name}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(render(document))


def measured(
    name: str, folder: Path, scratch: Path, windows: perplexity.Windows, exact: perplexity.Logprobs
) -> dict[str, Any]:
    """The row of a format: its perplexity, and how far log-probabilities are from those of what is meant."""
    meant = save(folder, scratch / "quantized", FORMATS[name])
    settings = {"dtype": "float32", "device": "cpu", "compile": False, "max_model_len": WINDOW + 1}
    with Runtime.from_pretrained(scratch / "quantized", **settings) as runtime:
        kept = runtime.stats()["quantization"]
        ours = logprobs_of(runtime, windows)
    reference = by_weights(folder, meant, FORMATS[name].activations, windows[0][:FEW])
    off = [abs(one - other) for one, other in zip(ours, reference, strict=False)]
    schemes = " and ".join(one.split(":")[0] for one in kept["schemes"]) if kept else "dequantized"
    return row(name, ours, exact) | {"kept_as": schemes, "off_what_is_meant": sum(off) / len(off)}


def save(folder: Path, target: Path, form: Format) -> dict[str, Tensor]:
    """Write the quantized checkpoint; returns the weights of its modules that the tool reads in them."""
    target.mkdir()
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": form.config}
    (target / "config.json").write_text(json.dumps(config))
    for path in folder.glob("tokenizer*"):
        (target / path.name).write_bytes(path.read_bytes())
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in tensors_of(folder):
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            stored[name] = tensor.contiguous()
            continue
        parts, meant[name] = form.write(tensor.float())
        stored |= {f"{module}.{part}": one.detach().clone().contiguous() for part, one in parts.items()}
    save_file(stored, target / "model.safetensors")
    return {name: one.contiguous() for name, one in meant.items()}


def tensors_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        yield from load_file(path).items()


def by_weights(
    folder: Path, meant: Mapping[str, Tensor], activations: int | None, ids: list[int]
) -> perplexity.Logprobs:
    """What transformers finds in float32 with these weights, inputs of their modules rounded to e4m3."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.load_state_dict(dict(meant), strict=False)

    def rounded(module: Any, given: tuple[Tensor]) -> Tensor:
        (x,) = given
        padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % (activations or x.shape[-1])))
        groups = padded.unflatten(-1, (-1, activations or x.shape[-1]))
        scale = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 448
        return ((groups / scale).to(E4M3).float() * scale).flatten(-2)[..., : x.shape[-1]]

    if activations is not None:
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(rounded)
    return perplexity.logprobs_by(model, [ids])


def row(name: str, values: perplexity.Logprobs, exact: perplexity.Logprobs) -> dict[str, Any]:
    return {
        "name": name,
        "perplexity": round(perplexity_of(values), 4),
        "by_the_oracles": round(perplexity_of(values) / perplexity_of(exact), 5),
    }


def render(document: Mapping[str, Any]) -> str:
    """Markdown: a row a format."""
    lines = [
        f"| {document['num_tokens']} tokens | kept as | perplexity "
        "| by the original's | nats off what is meant |",
        "|---|---|---|---|---|",
    ]
    for one in document["results"]:
        off = f"{one['off_what_is_meant']:.1e}" if "off_what_is_meant" in one else "–"
        lines.append(
            f"| {one['name']} | {one.get('kept_as', '–')} | {one['perplexity']:.3f} "
            f"| {one['by_the_oracles']:.4f} | {off} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
