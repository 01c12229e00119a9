"""Quantized modules as public tools pack and unpack them, written to by_tools.safetensors.

    pip install gptqmodel==7.7.0 bitsandbytes==0.50.2 nvidia-modelopt==0.47.0   # beside compressed-tensors
    python -m tests.models.checkpoints.quantized.make_by_tools

Each case has the dense weight that it was made of (its scales and zero points are those of writers.py where a
tool is given them), the tensors that the tool stores, and the weight that the tool itself reads out of them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from . import writers

TARGET = Path(__file__).with_name("by_tools.safetensors")
ROWS, COLUMNS = 32, 128
Made = tuple[dict[str, Tensor], Tensor]  # what a tool stores, and what it reads out of that


def dense(rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    """The weight that every case is made of, or a corner of it."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(ROWS, COLUMNS, generator=generator)[:rows, :columns].contiguous() * 0.05


def order(group: int) -> writers.Array:
    """The group of each column, where columns have an order of their own."""
    return np.random.default_rng(3).permutation(np.arange(COLUMNS) // group)


def gptq(weight: Tensor, *, group: int, sym: bool, version: int, is_ordered: bool = False) -> Made:
    """GPTQModel packs v2; v1 is made of it as GPTQModel does when it saves one."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    columns = weight.shape[1]
    size = columns if group == -1 else group
    group_of = order(group) if is_ordered else np.arange(columns) // size
    numbers, scales, zeros, _ = writers.numbers_of(weight.numpy(), group, zero=not sym, group_of=group_of)
    zeros = np.maximum(zeros, 1) if version == 1 else zeros
    linear = torch.nn.Linear(columns, weight.shape[0], bias=False)
    steps = scales.astype(np.float32)[:, group_of]
    linear.weight.data = torch.from_numpy((numbers - zeros[:, group_of]) * steps).float()
    kind = {"bits": 4, "group_size": group, "sym": sym, "desc_act": is_ordered}
    module = TorchLinear(in_features=columns, out_features=weight.shape[0], **kind)
    given = torch.from_numpy(scales).float(), torch.from_numpy(zeros).float()
    module.pack(linear, *given, torch.from_numpy(group_of.astype(np.int32)))
    module.post_init()
    meant = module.dequantize_weight().T.float().contiguous()
    if version == 1:
        convert_gptq_v2_to_v1_format_module(module, QuantizeConfig(bits=4, group_size=group))
    return {name: getattr(module, name) for name in ("qweight", "qzeros", "scales", "g_idx")}, meant


def awq(weight: Tensor, *, group: int) -> Made:
    """GPTQModel's packing for AWQ's gemm, whose module itself asks for a GPU."""
    from gptqmodel.nn_modules.qlinear.gemm_awq import AwqGEMMLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    rows, columns = weight.shape
    numbers, scales, zeros, _ = writers.numbers_of(weight.numpy(), group, zero=True)
    linear = torch.nn.Linear(columns, rows, bias=False)
    owner = np.arange(columns) // group
    linear.weight.data = torch.from_numpy((numbers - zeros[:, owner]) * scales.astype(np.float32)[:, owner])
    module = torch.nn.Module()
    module.bits, module.group_size, module.in_features = 4, group, columns
    AwqGEMMLinear.pack(module, linear, torch.from_numpy(scales).float(), torch.from_numpy(zeros).float())
    held = {name: getattr(module, name) for name in ("qweight", "qzeros", "scales")}
    meant = dequantize_gemm(held["qweight"], held["qzeros"], held["scales"].float(), 4, group)
    return held, meant.T.float().contiguous()


def bitsandbytes(weight: Tensor, *, kind: str, nested: bool) -> Made:
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    meant = functional.dequantize_4bit(packed, state).float()
    return {
        "weight": packed,
        **{f"weight.{name}": one for name, one in state.as_dict(packed=True).items()},
    }, meant


def modelopt_fp8(weight: Tensor) -> Made:
    from modelopt.torch.quantization.qtensor import FP8QTensor

    scale = weight.abs().amax() / 448.0
    quantized, _ = FP8QTensor.quantize(weight, scale)
    meant = quantized.dequantize(dtype=torch.float32, scale=scale)
    return {"weight": quantized._quantized_data, "weight_scale": scale}, meant


def modelopt_nvfp4(weight: Tensor) -> Made:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    quantized, scale, scale_of_all = NVFP4QTensor.quantize(weight, 16)
    meant = quantized.dequantize(
        dtype=torch.float32, scale=scale, double_scale=scale_of_all, block_sizes={-1: 16}, fast=False
    )
    held = {"weight": quantized._quantized_data, "weight_scale": scale, "weight_scale_2": scale_of_all}
    return held, meant


CASES: dict[str, Callable[[Tensor], Made]] = {
    "gptq v1": partial(gptq, group=64, sym=True, version=1),
    "gptq v2": partial(gptq, group=128, sym=True, version=2),
    "gptq v1 with zero points": partial(gptq, group=32, sym=False, version=1),
    "gptq v2 with zero points": partial(gptq, group=32, sym=False, version=2),
    "gptq v1 in an order": partial(gptq, group=64, sym=True, version=1, is_ordered=True),
    "gptq v2 of rows": partial(gptq, group=-1, sym=False, version=2),
    "awq": partial(awq, group=64),
    "nf4": partial(bitsandbytes, kind="nf4", nested=False),
    "nf4, double": partial(bitsandbytes, kind="nf4", nested=True),
    "fp4, double": partial(bitsandbytes, kind="fp4", nested=True),
    "modelopt fp8": modelopt_fp8,
    "modelopt nvfp4": modelopt_nvfp4,
}


def tensors() -> Iterator[tuple[str, Tensor]]:
    for name, make in CASES.items():
        held, meant = make(dense())
        print(name, {key: (tuple(one.shape), one.dtype) for key, one in held.items()})
        for key, one in {**held, "meant": meant}.items():
            yield f"{name}/{key}", one.detach().clone().contiguous()


if __name__ == "__main__":
    save_file(dict(tensors()), TARGET)
