"""Every dialect of quantized checkpoints: its bytes are kept, and the model computes with what they mean."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lamina.models.checkpoints.loaded_weights import LoadedWeights
from lamina.models.checkpoints.weights import load_weights, read_checkpoint
from lamina.models.config import read_model_config
from lamina.models.registry import find_model

from . import writers
from .writers import DYNAMIC, Dialect, ct, weights_of

PROMPT = [(37 * i) % 317 + 3 for i in range(24)]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}


Logits = Callable[..., Tensor]
FLOAT32_RMS = 1e-5  # of the logits, by theirs
FLOAT8_RMS = 1e-2  # where activations are rounded to three bits, for some another way than by the reference


def gptq(group: int, version: int = 1, *, sym: bool = True, **more: Any) -> Dialect:
    name = "gptq" if version == 1 else "gptq_v2"
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": sym, "checkpoint_format": name}
    write = partial(writers.gptq, group=group, sym=sym, version=version)
    return Dialect(config=config | {"desc_act": False} | more, write=write, scheme="w4a16")


def awq(group: int, **more: Any) -> Dialect:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Dialect(config=config | more, write=partial(writers.awq, group=group), scheme="w4a16")


def packed(group: int, *, sym: bool = True, packed_zeros: bool = True, **more: Any) -> Dialect:
    kind = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    write = partial(writers.ct_packed, group=group, sym=sym, packed_zeros=packed_zeros)
    return ct("pack-quantized", weights_of(4, "int", **kind, symmetric=sym, **more), write, "w4a16")


def ct_float8(by: str, scheme: str = "fp8", **more: Any) -> Dialect:
    write = partial(writers.float8, by=by, like=lambda scales: scales[0] if by == "tensor" else scales)
    return ct("float-quantized", weights_of(8, "float", by, **more), write, scheme, input_activations=DYNAMIC)


def scalar(scales: Tensor) -> Tensor:
    return scales.reshape(())


STATIC = {"input_scale": torch.tensor(0.03)}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCK = {**FP8, "fmt": "e4m3", "weight_block_size": [128, 128]}
MODELOPT = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
DIALECTS = {
    **{f"gptq, groups of {group}": gptq(group) for group in (32, 64, 128, -1)},
    "gptq v2": gptq(32, 2),
    "gptq v2 named v1": Dialect(
        config=gptq(32).config, write=partial(writers.gptq, group=32, sym=True, version=2), scheme="w4a16"
    ),
    "gptq, zero points": gptq(64, 1, sym=False),
    "gptq v2, zero points": gptq(64, 2, sym=False),
    **{f"awq, groups of {group}": awq(group) for group in (32, 64, 128)},
    **{f"compressed-tensors w4a16, groups of {group}": packed(group) for group in (32, 64, 128, -1)},
    "compressed-tensors w4a16, zero points": packed(32, sym=False),
    "compressed-tensors w4a16, zero points a row": packed(-1, sym=False),
    "compressed-tensors w4a16, zero points in bytes": packed(64, sym=False, packed_zeros=False),
    "compressed-tensors w4a16, actorder weight": packed(64, actorder="weight"),
    "compressed-tensors w8a16": ct(
        "pack-quantized", weights_of(8, "int", "channel"), writers.ct_packed_bytes, "int8"
    ),
    "compressed-tensors w8a8": ct(
        "int-quantized",
        weights_of(8, "int", "channel"),
        partial(writers.ct_int8, by_row=True),
        "int8",
        input_activations={**DYNAMIC, "type": "int"},
    ),
    "compressed-tensors w8a8, a scale for all, static": ct(
        "int-quantized",
        weights_of(8, "int", "tensor"),
        partial(writers.ct_int8, by_row=False, static=True),
        "int8",
        input_activations={**DYNAMIC, "type": "int", "dynamic": False, "strategy": "tensor"},
    ),
    **{f"compressed-tensors float8 by {by}": ct_float8(by) for by in ("tensor", "channel")},
    "compressed-tensors float8 by block": ct_float8("block", "fp8_block", block_structure=[128, 128]),
    "compressed-tensors float8 by group": ct_float8("group", "fp8_block", group_size=128),
    "compressed-tensors float8, weights alone": ct(
        "float-quantized", weights_of(8, "float", "channel"), partial(writers.float8, by="channel"), None
    ),
    "compressed-tensors nvfp4": ct(
        "nvfp4-pack-quantized",
        weights_of(4, "float", "tensor_group", group_size=16),
        partial(writers.nvfp4, modelopt=False),
        None,
    ),
    "fp8": Dialect(config=FP8, write=partial(writers.float8, by="tensor", like=scalar), scheme="fp8"),
    "fp8, static": Dialect(
        config={**FP8, "activation_scheme": "static"},
        write=partial(writers.float8, by="tensor", like=scalar, others=STATIC),
        scheme="fp8",
    ),
    "fp8 by block": Dialect(
        config=BLOCK, write=partial(writers.float8, by="block", scale="weight_scale_inv"), scheme="fp8_block"
    ),
    "fp8 by block, powers of two": Dialect(
        config={**BLOCK, "scale_fmt": "ue8m0"},
        write=partial(writers.float8, by="block", scale="weight_scale_inv", like=writers.as_exponents),
        scheme="fp8_block",
    ),
    "fbgemm": Dialect(
        config={
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 0.5,
            "modules_to_not_convert": ["lm_head"],
        },
        write=partial(writers.float8, by="channel"),
        scheme="fp8",
    ),
    "modelopt": Dialect(
        config={},
        files={"hf_quant_config.json": MODELOPT},
        write=partial(writers.float8, by="tensor", like=scalar, others=STATIC),
        scheme="fp8",
    ),
    "modelopt by channel": Dialect(
        config={"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": ["lm_head"]},
        write=partial(writers.float8, by="channel", like=lambda scales: scales[:, 0]),
        scheme="fp8",
    ),
    "modelopt nvfp4": Dialect(
        config={"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
        write=partial(writers.nvfp4, modelopt=True),
        scheme=None,
    ),
    "nf4": Dialect(config=NF4, write=partial(writers.nf4, nested=False), scheme=None),
    "nf4, double": Dialect(config=NF4, write=partial(writers.nf4, nested=True), scheme=None),
}


@pytest.fixture(scope="session")
def source(make_tiny_folder: Callable[..., Path]) -> Path:
    return make_tiny_folder(**SIZES)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedWeights:
    config = read_model_config(folder)
    checkpoint = read_checkpoint(find_model(config.architecture), config, folder)
    return load_weights(checkpoint, dtype=dtype, device="cpu")


def restored(weights: LoadedWeights) -> dict[str, Tensor]:
    """Every parameter by the name of its tensors in a dense checkpoint."""
    joined, out = weights.schemes.join(weights.by_name), {}
    for name, spec in weights.specs.items():
        kept: Any = joined[name]
        rows = kept if isinstance(kept, Tensor) else kept.scheme.restore(kept.parts)
        sizes = [shape[0] for shape in spec.source_shapes.values()]
        out |= dict(zip(spec.sources, rows.split(sizes), strict=True))
    return out


def round_inputs(model: Any, dialect: Dialect) -> None:
    """Let projections take activations in float8: a scale a token, or for each 128 columns of it."""
    bound = dialect.config.get("activation_scale_ub", torch.inf)

    def rounded(module: Any, given: tuple[Tensor]) -> Tensor:
        x = given[0].clamp(-bound, bound)
        groups = x.unflatten(-1, (-1, 128 if dialect.scheme == "fp8_block" else x.shape[-1]))
        scale = groups.abs().amax(dim=-1, keepdim=True) / 448
        return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(rounded)


@pytest.mark.parametrize("name", DIALECTS)
def test_what_is_kept_is_what_the_checkpoint_means_and_the_model_computes_with_it(
    name: str, source: Path, tmp_path: Path, logits_of: Logits, tiny_reference: Callable[..., Any]
) -> None:
    """Weights to the last bit, logits beside transformers, which rounds activations to float8 as we do."""
    dialect = DIALECTS[name]
    quantized, dense = writers.save(tmp_path, source, dialect, bias=name.startswith("gptq"))
    weights, meant = load(quantized), load_file(dense / "model.safetensors")
    kept = restored(weights)
    assert kept.keys() == meant.keys()
    for key, wanted in meant.items():
        assert torch.equal(kept[key], wanted), key
    names = {scheme.name for scheme in weights.schemes.schemes.values()}
    assert names == ({dialect.scheme} if dialect.scheme else set())
    assert all(error.max_error == 0 for error in weights.errors().values())
    is_float8 = "fp8" in str(dialect.scheme)
    model = tiny_reference(dense)
    if is_float8:
        round_inputs(model, dialect)
    with torch.inference_mode():
        ours, expected = logits_of(quantized, PROMPT), model(torch.tensor([PROMPT])).logits[0]
    bound = FLOAT8_RMS if is_float8 else FLOAT32_RMS
    assert (ours - expected).square().mean().sqrt() < bound * expected.square().mean().sqrt()
