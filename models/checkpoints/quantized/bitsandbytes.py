"""Checkpoints of bitsandbytes in four bits: numbers that point into a table, by the scale of each block."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....common.errors import LoadError
from ...fields import Fields
from ...quantization.scheme import Shape
from .dialect import HEAD, Dialect, is_named, refused, require
from .formats import Expected, Format, Tensors, dequantized

STATE = "weight.quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")


def read(fields: Fields) -> Dialect:
    """The dialect that a config of bitsandbytes describes; UnsupportedError for what is not of four bits."""
    if fields.boolean("load_in_8bit", False) or not fields.boolean("load_in_4bit", False):
        raise refused(fields, "load_in_8bit", True, "load_in_4bit")
    kind = fields.text("bnb_4bit_quant_type", "fp4")
    require(fields, "bnb_4bit_quant_type", kind, KINDS)
    storage = fields.text("bnb_4bit_quant_storage", "uint8")
    require(fields, "bnb_4bit_quant_storage", storage, ("uint8",))
    form, names = _format(kind), fields.texts("llm_int8_skip_modules")
    return Dialect(
        name="bitsandbytes",
        format_of=lambda module: None if module == HEAD or is_named(module, names) else form,
    )


def _format(kind: str) -> Format:
    def tensors(shape: Shape) -> Mapping[str, Expected]:
        count = shape[0] * shape[1]
        blocks = tuple((-(-count // size),) for size in (64, 128, 256, 512, 1024, 2048, 4096))
        nested = tuple((-(-number // 256),) for (number,) in blocks)
        table, floats = frozenset({"F32"}), frozenset({"F32", "U8"})
        return {
            "weight": Expected(((-(-count // 2), 1),), frozenset({"U8"})),
            "weight.absmax": Expected(blocks, floats),
            "weight.quant_map": Expected(((16,),), table),
            "weight.nested_absmax": Expected(nested, table, is_required=False),
            "weight.nested_quant_map": Expected(((256,),), table, is_required=False),
            f"{STATE}{kind}": Expected((), frozenset({"U8"})),  # any length
        }

    def rows(given: Tensors, shape: Shape) -> Tensor:
        state = _state(given[f"{STATE}{kind}"], kind, shape)
        packed = given["weight"].reshape(-1)
        numbers = torch.stack((packed >> 4, packed & 15), dim=1).reshape(-1)
        values = given["weight.quant_map"][numbers.long()][: shape[0] * shape[1]]
        scale = _absmax(given, state).repeat_interleave(int(state["blocksize"]))
        if scale.shape[0] < values.shape[0]:
            raise LoadError(f"has {scale.shape[0]} weights in its blocks, wanted {values.shape[0]}")
        return (values * scale[: values.shape[0]]).view(shape)

    return dequantized(f"bitsandbytes {kind}", tensors, rows)


def _absmax(given: Tensors, state: Mapping[str, Any]) -> Tensor:
    """The scales of blocks, which may be numbers that point into a table themselves."""
    absmax = given["weight.absmax"]
    if absmax.dtype != torch.uint8:
        return absmax
    if "weight.nested_absmax" not in given or "weight.nested_quant_map" not in given:
        raise LoadError("lacks weight.nested_absmax or weight.nested_quant_map, since absmax is in bytes")
    outer = given["weight.nested_absmax"].repeat_interleave(int(state["nested_blocksize"]))
    table = given["weight.nested_quant_map"][absmax.long()]
    return table * outer[: absmax.shape[0]] + float(state["nested_offset"])


def _state(text: Tensor, kind: str, shape: Shape) -> Mapping[str, Any]:
    """What the module says of itself in JSON. LoadError where it says something else than is there."""
    try:
        fields = Fields(json.loads(bytes(text.tolist())), "its quant_state")
        state = {"blocksize": fields.integer("blocksize"), "nested_blocksize": 256, "nested_offset": 0.0}
        state["nested_blocksize"] = fields.integer("nested_blocksize", 256)
        state["nested_offset"] = fields.number("nested_offset", 0.0, minimum=-1e30)
        subject = fields.text("quant_type"), tuple(fields.values.get("shape") or ())
    except Exception as error:  # bytes of anything
        raise LoadError(f"has a quant_state that cannot be read: {error}") from error
    if subject != (kind, shape):
        raise LoadError(
            f"says it is {subject[0]} of shape {list(subject[1])}; wanted {kind} of {list(shape)}"
        )
    return state
