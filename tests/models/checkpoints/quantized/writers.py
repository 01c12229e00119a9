"""Quantized modules as public tools write them, by loops over numbers: tensors, and the weights meant."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Array = npt.NDArray[Any]
Module = tuple[dict[str, Tensor], Array]  # tensors by their names below the module's; the weights they mean
AWQ_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)  # where column 8c + j lies in word c
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The table of nf4 is of bitsandbytes, to six digits: what matters is that the file brings its own.
NF4 = (
    *(-1.0, -0.696193, -0.525073, -0.394917, -0.284441, -0.184773, -0.091050, 0.0, 0.079580, 0.160930),
    *(0.246112, 0.337915, 0.440710, 0.562617, 0.722956, 1.0),
)


def words(numbers: Array, place: tuple[int, ...] = tuple(range(8))) -> Array:
    """int32 [R, ceil(C / 8)]: of eight neighbours in a row number j lies in bits 4 * place[j] of a word."""
    rows, columns = numbers.shape
    out = np.zeros((rows, -(-columns // 8)), dtype=np.int64)
    for r in range(rows):
        for c in range(columns):
            out[r, c // 8] |= int(numbers[r, c]) << (4 * place[c % 8])
    return out.astype(np.uint32).view(np.int32)


def numbers_of(
    weight: Array, group: int, *, zero: bool, group_of: Array | None = None, dtype: Any = np.float16
) -> tuple[Array, Array, Array, Array]:
    """Numbers 0 to 15 [N, K], scales [N, G] in the dtype, zero points [N, G], the weights [N, K] meant."""
    rows, columns = weight.shape
    size = columns if group == -1 else group
    group_of = np.arange(columns) // size if group_of is None else group_of
    numbers, meant = np.zeros((rows, columns), np.int64), np.zeros((rows, columns), np.float32)
    scales, zeros = np.zeros((rows, columns // size), dtype), np.full((rows, columns // size), 8)
    for n in range(rows):
        for g in range(columns // size):
            own = weight[n, group_of == g]
            low, high = min(0.0, float(own.min())), max(0.0, float(own.max()))
            step = (high - low) / 15 if zero else max(-low, high) / 7.5
            scales[n, g] = dtype(step or 1.0)
            scale = np.float32(scales[n, g])
            if zero:
                zeros[n, g] = np.clip(np.round(-low / scale), 0, 15)
            numbers[n, group_of == g] = np.clip(np.round(own / scale) + zeros[n, g], 0, 15)
            meant[n, group_of == g] = (numbers[n, group_of == g] - zeros[n, g]).astype(np.float32) * scale
    return numbers, scales, zeros, meant


def tensor(values: Array) -> Tensor:
    return torch.from_numpy(values.copy(order="C"))


def gptq(weight: Array, *, group: int, sym: bool, version: int, group_of: Array | None = None) -> Module:
    """AutoGPTQ's v1 stores zero points less one, GPTQModel's v2 as they are."""
    numbers, scales, zeros, meant = numbers_of(weight, group, zero=not sym, group_of=group_of)
    if not sym and version == 1:  # stored 15 would mean 16, which tools read differently
        zeros = np.maximum(zeros, 1)
        owner = np.arange(weight.shape[1]) // (weight.shape[1] if group == -1 else group)
        owner = owner if group_of is None else group_of
        meant = (numbers - zeros[:, owner]).astype(np.float32) * scales.astype(np.float32)[:, owner]
    size = weight.shape[1] if group == -1 else group
    order = np.arange(weight.shape[1]) // size if group_of is None else group_of
    return {
        "qweight": tensor(words(numbers).T),
        "qzeros": tensor(words(zeros.T - (version == 1))),
        "scales": tensor(scales.T),
        "g_idx": tensor(order.astype(np.int32)),
    }, meant


def awq(weight: Array, *, group: int) -> Module:
    numbers, scales, zeros, meant = numbers_of(weight, group, zero=True)
    return {
        "qweight": tensor(words(numbers.T, AWQ_NIBBLE)),
        "qzeros": tensor(words(zeros.T, AWQ_NIBBLE)),
        "scales": tensor(scales.T),
    }, meant


def ct_packed(
    weight: Array, *, group: int, sym: bool, group_of: Array | None = None, packed_zeros: bool = True
) -> Module:
    numbers, scales, zeros, meant = numbers_of(weight, group, zero=not sym, group_of=group_of)
    out = {
        "weight_packed": tensor(words(numbers)),
        "weight_scale": tensor(scales),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not sym:
        out["weight_zero_point"] = (
            tensor(words(zeros.T).T) if packed_zeros else tensor((zeros - 8).astype(np.int8))
        )
    if group_of is not None:
        out["weight_g_idx"] = tensor(group_of.astype(np.int32))
    return out, meant


def ct_packed_bytes(weight: Array) -> Module:
    numbers, scales, meant = whole_numbers(weight, by_row=True)
    stored = (numbers.astype(np.int64) + 128).astype(np.uint8)
    padded = np.zeros((stored.shape[0], -(-stored.shape[1] // 4) * 4), np.uint8)
    padded[:, : stored.shape[1]] = stored
    return {
        "weight_packed": tensor(padded.view(np.int32)),
        "weight_scale": tensor(scales[:, None]),
        "weight_shape": torch.tensor(weight.shape),
    }, meant


def whole_numbers(weight: Array, *, by_row: bool) -> tuple[Array, Array, Array]:
    peak = np.abs(weight).max(axis=1) if by_row else np.abs(weight).max(keepdims=True)[0]
    scales = np.broadcast_to((peak / 127).astype(np.float32), weight.shape[:1] if by_row else (1,))
    numbers = np.round(weight / scales[:, None]).clip(-128, 127).astype(np.int8)
    return numbers, scales, numbers.astype(np.float32) * scales[:, None]


def ct_int8(weight: Array, *, by_row: bool, static: bool = False) -> Module:
    numbers, scales, meant = whole_numbers(weight, by_row=by_row)
    out = {"weight": tensor(numbers), "weight_scale": tensor(scales[:, None] if by_row else scales)}
    return out | ({"input_scale": torch.tensor([0.05])} if static else {}), meant


def float8(
    weight: Array,
    *,
    by: str,
    scale: str = "weight_scale",
    like: Callable[[Tensor], Tensor] = lambda scales: scales,
    others: Mapping[str, Tensor] | None = None,
) -> Module:
    """`by`: tensor, channel, block or group; `like` gives the scales the shape or dtype of a dialect."""
    rows, columns = weight.shape
    row_size, column_size = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "block": (128, 128),
        "group": (1, 128),
    }[by]
    scales = np.zeros((-(-rows // row_size), -(-columns // column_size)), np.float32)
    values, meant = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn), np.zeros_like(weight)
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            at = slice(r * row_size, (r + 1) * row_size), slice(c * column_size, (c + 1) * column_size)
            scales[r, c] = np.abs(weight[at]).max() / 448 or 1.0
            if like is as_exponents:
                scales[r, c] = 2.0 ** np.ceil(np.log2(scales[r, c]))
            values[at] = torch.from_numpy(weight[at] / scales[r, c]).to(torch.float8_e4m3fn)
            meant[at] = values[at].float().numpy() * scales[r, c]
    return {
        "weight": values,
        scale: like(torch.from_numpy(scales)),
        **{name: one.clone() for name, one in (others or {}).items()},
    }, meant


def as_exponents(scales: Tensor) -> Tensor:
    return (torch.log2(scales) + 127).round().to(torch.uint8)


def nvfp4(weight: Array, *, modelopt: bool) -> Module:
    """compressed-tensors divides by its scale of all, modelopt multiplies."""
    rows, columns = weight.shape
    of_all = np.float32(448 * 6 / np.abs(weight).max())
    scales = torch.zeros(rows, columns // 16, dtype=torch.float8_e4m3fn)
    packed, meant = np.zeros((rows, columns // 2), np.uint8), np.zeros_like(weight)
    factor = np.float32(1) / of_all
    for n in range(rows):
        for g in range(columns // 16):
            own = weight[n, 16 * g : 16 * (g + 1)]
            scales[n, g] = float(np.abs(own).max() / 6 * of_all)
            stored = np.float32(scales[n, g].float())
            step = (stored * factor if modelopt else stored / of_all) or np.float32(1)
            for i, value in enumerate(own):
                k = 16 * g + i
                code = int(np.abs(np.array(E2M1) - abs(value) / step).argmin())
                packed[n, k // 2] |= (code | (8 if value < 0 else 0)) << (4 * (k % 2))
                meant[n, k] = np.float32(-E2M1[code] if value < 0 else E2M1[code]) * step
    names = ("weight", "weight_scale_2") if modelopt else ("weight_packed", "weight_global_scale")
    one = torch.tensor(factor if modelopt else of_all).reshape(() if modelopt else (1,))
    return {names[0]: tensor(packed), "weight_scale": scales, names[1]: one}, meant


def nf4(weight: Array, *, nested: bool) -> Module:
    """Blocks of 64 of the flattened matrix; element 2i in the high four bits."""
    flat = weight.reshape(-1)
    codes, absmax = np.zeros(len(flat), np.uint8), np.zeros(-(-len(flat) // 64), np.float32)
    for b in range(len(absmax)):
        absmax[b] = np.abs(flat[64 * b : 64 * (b + 1)]).max()
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": weight.shape}
    out: dict[str, Tensor] = {"weight.quant_map": torch.tensor(NF4)}
    if nested:
        offset, table = float(absmax.mean()), np.linspace(-1, 1, 256, dtype=np.float32)
        outer = np.array(
            [np.abs(absmax[256 * b : 256 * (b + 1)] - offset).max() for b in range(-(-len(absmax) // 256))]
        ).astype(np.float32)
        inner = np.array(
            [np.abs(table - (x - offset) / (outer[i // 256] or 1)).argmin() for i, x in enumerate(absmax)]
        )
        absmax = table[inner] * outer[np.arange(len(absmax)) // 256] + np.float32(offset)
        out["weight.absmax"] = tensor(inner.astype(np.uint8))
        out |= {"weight.nested_absmax": tensor(outer), "weight.nested_quant_map": tensor(table)}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        out["weight.absmax"] = tensor(absmax)
    meant = np.zeros_like(flat)
    for i, value in enumerate(flat):
        codes[i] = np.abs(np.array(NF4) - value / absmax[i // 64]).argmin()
        meant[i] = np.float32(NF4[codes[i]]) * np.float32(absmax[i // 64])
    out["weight"] = tensor(((codes[::2] << 4) | codes[1::2])[:, None])
    out["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    return out, meant.reshape(weight.shape)


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """A config, and what stands for each module in its file."""

    config: dict[str, Any]
    write: Callable[[Array], Module]
    scheme: str | None  # the inner form
    files: dict[str, Any] = field(default_factory=dict)  # beside config.json
    dense: tuple[str, ...] = ("lm_head",)  # ends of the names of modules that stay


def ct(
    kind: str, weights: dict[str, Any], write: Callable[[Array], Module], scheme: str | None, **more: Any
) -> Dialect:
    """compressed-tensors with one group of all linear modules but the LM head."""
    group = {"targets": ["Linear"], "weights": weights, "output_activations": None, **more}
    group.setdefault("input_activations", None)
    config = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    return Dialect(config=config, write=write, scheme=scheme)


def weights_of(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
        "observer": "minmax",
        "group_size": None,
        **more,
    }


DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}


# Four bits a weight in symmetric groups of 32.
PACKED = ct(
    "pack-quantized",
    weights_of(4, "int", "group", group_size=32),
    partial(ct_packed, group=32, sym=True),
    "w4a16",
)


def save(folder: Path, source: Path, dialect: Dialect, *, bias: bool = False) -> tuple[Path, Path]:
    """A quantized copy of a dense checkpoint, and a dense one of the weights meant, below a folder."""
    held, meant = load_file(source / "model.safetensors"), {}
    quantized: dict[str, Tensor] = {}
    for name, value in held.items():
        module, _, kind = name.rpartition(".")
        if value.dim() != 2 or "embed" in name or kind != "weight" or module.endswith(dialect.dense):
            quantized[name] = meant[name] = value
            continue
        tensors, weights = dialect.write(value.numpy())
        quantized |= {f"{module}.{part}": one.contiguous() for part, one in tensors.items()}
        meant[name] = torch.from_numpy(np.ascontiguousarray(weights))
        if bias and f"{module}.bias" not in held:
            quantized[f"{module}.bias"] = torch.zeros(value.shape[0], dtype=torch.float16)
    config = json.loads((source / "config.json").read_text())
    for place, tensors, extra in (("quantized", quantized, dialect.config), ("dense", meant, None)):
        (folder / place).mkdir(parents=True)
        save_file(tensors, folder / place / "model.safetensors")
        own = config | ({"quantization_config": extra} if extra else {})
        (folder / place / "config.json").write_text(json.dumps(own))
    for name, content in dialect.files.items():
        (folder / "quantized" / name).write_text(json.dumps(content))
    return folder / "quantized", folder / "dense"
