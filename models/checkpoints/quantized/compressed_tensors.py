"""Checkpoints of compressed-tensors: groups of modules, each with a format of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ....common.errors import LoadError, UnsupportedError
from ...fields import Fields
from ...quantization.int8 import INT8
from ...quantization.scheme import Shape
from .dialect import Dialect, aliases, matches_expression, refused, require, static_scales
from .formats import (
    FLOATS,
    INT32,
    Expected,
    Format,
    Tensors,
    expanded_rows,
    float8_blocks,
    float8_groups,
    float8_rows,
    four_bit_parts,
    four_bits,
    int8_rows,
    nibbles,
    restored,
)
from .nvfp4 import nvfp4

FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    "nvfp4-pack-quantized",
)
DEFAULTS = {("int", 4): "pack-quantized", ("int", 8): "int-quantized", ("float", 4): FORMATS[-1]}
LINEAR = "Linear"  # the class of every projection
ZERO_POINTS = frozenset({"I8", "I32", "F8_E4M3", "BF16", "F16", "F32"})
WORD_OF_EIGHTS = -0x77777778
STATIC = ("input_scale", "input_zero_point", "input_global_scale")


class Group(NamedTuple):
    """The targets of a group, and how its modules lie."""

    targets: tuple[str, ...]
    format: Format


def read(fields: Fields) -> Dialect:
    """The dialect that a config of compressed-tensors describes.

    Raises ConfigError for a config that cannot be, UnsupportedError for what is not served, naming the field.
    """
    _refuse_transforms(fields)
    ignored, groups = fields.texts("ignore"), fields.object("config_groups")
    notes: dict[str, None] = {}
    read_groups = []
    for name, raw in groups.items():
        if not isinstance(raw, dict):
            raise refused(fields, f"config_groups.{name}", raw, "a group of targets and weights, written out")
        own = Fields(raw, f"{fields.origin}: config_groups.{name}")
        read_groups.append(Group(own.texts("targets"), _with_idle_zeros(_format(own, fields))))
        notes |= dict.fromkeys(_notes(own))

    def format_of(module: str) -> Format | None:
        if any(_is_target(fields, "ignore", name, module) for name in ignored):
            return None
        return _first_match(fields, read_groups, module)

    return Dialect(name="compressed-tensors", format_of=format_of, notes=tuple(notes))


def _with_idle_zeros(form: Format) -> Format:
    """The format with zero points beside symmetric weights, too, which some tools write: all are zero."""
    name = "weight_zero_point"

    def tensors(shape: Shape) -> Mapping[str, Expected]:
        return {name: Expected((), ZERO_POINTS, is_required=False), **form.tensors(shape)}

    def unpack(given: Tensors, shape: Shape) -> Sequence[Tensor]:
        if name in form.tensors(shape) or name not in given:
            return form.unpack(given, shape)
        if not _is_zero(given[name]):
            raise LoadError(f"has a {name} other than zero though symmetric is true")
        return form.unpack({key: one for key, one in given.items() if key != name}, shape)

    return replace(form, tensors=tensors, unpack=unpack)


def _is_zero(zero: Tensor) -> bool:
    """Whether zero points are all 0; packed, 8 stands for it."""
    is_packed = zero.dtype == torch.int32 and bool((zero == WORD_OF_EIGHTS).all())
    return is_packed or not bool(zero.to(torch.float32).any())


def _refuse_transforms(fields: Fields) -> None:
    sparsity = Fields(fields.object("sparsity_config"), f"{fields.origin}: sparsity_config")
    if sparsity.values:
        require(sparsity, "format", sparsity.text("format", "dense"), ("dense",))
    transforms = fields.object("transform_config")
    if transforms.get("config_groups"):
        raise refused(fields, "transform_config", transforms, "null: no rotations beside the weights")


def _notes(group: Fields) -> tuple[str, ...]:
    activations = Fields(group.object("input_activations"), f"{group.origin}: input_activations")
    is_static = bool(activations.values) and activations.values.get("dynamic") in (False, None)
    return static_scales(activations, "dynamic", "static" if is_static else "dynamic")


def _first_match(fields: Fields, groups: list[Group], module: str) -> Format | None:
    """By an exact name first, then by the first expression in order, then by the class."""
    named = [(target, group) for group in groups for target in group.targets]
    for is_wanted in (_is_exact, _is_expression, _is_class):
        for target, group in named:
            if is_wanted(target) and _is_target(fields, "targets", target, module):
                return group.format
    return None


def _is_expression(target: str) -> bool:
    return target.startswith("re:")


def _is_class(target: str) -> bool:
    return target == LINEAR


def _is_exact(target: str) -> bool:
    return not _is_expression(target) and not _is_class(target)


def _is_target(fields: Fields, field: str, target: str, module: str) -> bool:
    if _is_class(target):
        return True
    if _is_expression(target):
        pattern = target.removeprefix("re:")
        return any(matches_expression(fields, field, pattern, name) for name in aliases(module))
    return target in aliases(module)


def _format(group: Fields, config: Fields) -> Format:
    """How the modules of a group lie."""
    weights = Fields(group.object("weights"), f"{group.origin}: weights")
    if not weights.values:
        raise refused(group, "weights", None, "weights that are quantized")
    if group.object("output_activations"):
        raise refused(group, "output_activations", group.values["output_activations"], "null")
    own = group.text("format", None) or config.text("format", None)
    kind, bits = weights.text("type", "int").lower(), weights.integer("num_bits", 8)
    require(weights, "type", kind, ("int", "float"))
    if own in (None, "mixed-precision"):
        own = {
            ("int", 4): "pack-quantized",
            ("int", 8): "int-quantized",
            ("float", 4): "nvfp4-pack-quantized",
        }.get((kind, bits), "float-quantized")
    require(config, "format", own, FORMATS)
    if own == "nvfp4-pack-quantized":
        require(weights, "num_bits", bits, (4,))
        return nvfp4(
            "compressed-tensors nvfp4-pack-quantized", "weight_packed", "weight_global_scale", divide=True
        )
    if kind == "float":
        require(weights, "num_bits", bits, (8,))
        return _float8(weights, is_weight_only=not group.object("input_activations"))
    if own == "pack-quantized":
        return _packed(weights, bits, group)
    require(weights, "num_bits", bits, (8,))
    return _int8(weights)


def _float8(weights: Fields, *, is_weight_only: bool) -> Format:
    strategy = weights.text("strategy", "tensor")
    _require_symmetric(weights, "weights in float8")
    if strategy == "block":
        block = weights.values.get("block_structure")
        require(weights, "block_structure", block, ([128, 128], "128x128"))
        form = float8_blocks("compressed-tensors float-quantized, by blocks", "weight_scale", STATIC)
    elif strategy == "group":
        require(weights, "group_size", weights.integer("group_size"), (128,))
        form = float8_groups("compressed-tensors float-quantized, by groups", "weight_scale", STATIC)
    else:
        require(weights, "strategy", strategy, ("tensor", "channel", "block", "group"))
        form = float8_rows(f"compressed-tensors float-quantized, by {strategy}", "weight_scale", STATIC)
    return restored(form) if is_weight_only else form


def _int8(weights: Fields) -> Format:
    require(weights, "strategy", weights.text("strategy", "tensor"), ("tensor", "channel"))
    _require_symmetric(weights, "weights in whole numbers of 8 bits")
    return int8_rows("compressed-tensors int-quantized", STATIC)


def _packed(weights: Fields, bits: int, group: Fields) -> Format:
    require(weights, "num_bits", bits, (4, 8))
    if group.object("input_activations"):
        raise refused(
            group, "input_activations", group.values["input_activations"], "null for packed weights"
        )
    strategy = weights.text("strategy", "group")
    require(weights, "strategy", strategy, ("group", "channel"))
    if bits == 8:
        require(weights, "strategy", strategy, ("channel",))
        _require_symmetric(weights, "packed weights of 8 bits")
        return _packed_bytes()
    actorder = weights.values.get("actorder")
    require(weights, "actorder", actorder, (None, "group", "weight", "static", False))
    size = -1 if strategy == "channel" else weights.integer("group_size", minimum=-1)
    return _packed_nibbles(weights, size, is_ordered=actorder == "group")


def _require_symmetric(weights: Fields, what: str) -> None:
    if not weights.boolean("symmetric", True):
        raise refused(weights, "symmetric", False, f"true for {what}")


def _packed_nibbles(weights: Fields, size: int, *, is_ordered: bool) -> Format:
    is_symmetric = weights.boolean("symmetric", True)
    is_ordered = is_ordered and size != -1
    try:
        scheme = four_bits(size, zero=not is_symmetric, order=is_ordered)
    except UnsupportedError as error:
        raise UnsupportedError(f"{weights.origin}: {error}") from error

    def tensors(shape: Shape) -> Mapping[str, Expected]:
        rows, columns = shape
        groups = 1 if size == -1 else columns // size
        own = {
            "weight_packed": Expected(((rows, -(-columns // 8)),), INT32),
            "weight_scale": Expected(((rows, groups),), FLOATS),
            "weight_shape": Expected(((2,),), frozenset({"I64", "I32"}), is_required=False),
        }
        if not is_symmetric:
            packed, bytes_ = (-(-rows // 8), groups), (rows, groups)
            own["weight_zero_point"] = Expected((packed, bytes_), frozenset({"I32", "I8"}))
        if is_ordered:
            own["weight_g_idx"] = Expected(((columns,),), INT32)
        return own

    def unpack(given: Tensors, shape: Shape) -> list[Tensor]:
        _check_shape(given, shape)
        scale, zero = given["weight_scale"], given.get("weight_zero_point")
        zero = None if zero is None else _zero_points(zero, shape[0])
        numbers = nibbles(given["weight_packed"], shape[1], dim=1)
        return four_bit_parts(numbers, scale, zero, given.get("weight_g_idx"))

    return Format(name="compressed-tensors pack-quantized", scheme=scheme, tensors=tensors, unpack=unpack)


def _zero_points(zero: Tensor, rows: int) -> Tensor:
    """Zero points from 0 to 15, packed, or as signed bytes as old files have them."""
    if zero.dtype == torch.int8 or (zero.shape[0] == rows and rows > 1):
        if bool((zero < -8).any()) or bool((zero > 7).any()):
            raise LoadError("has zero points beyond -8 to 7")
        return zero + 8
    return nibbles(zero, rows, dim=0)


def _check_shape(given: Tensors, shape: Shape) -> None:
    given_shape = given.get("weight_shape")
    if given_shape is not None and tuple(given_shape.tolist()) != shape:
        raise LoadError(f"has a weight_shape of {given_shape.tolist()}; its config calls for {list(shape)}")


def _packed_bytes() -> Format:
    def tensors(shape: Shape) -> Mapping[str, Expected]:
        return {
            "weight_packed": Expected(((shape[0], -(-shape[1] // 4)),), INT32),
            "weight_scale": Expected(((shape[0], 1),), FLOATS),
            "weight_shape": Expected(((2,),), frozenset({"I64", "I32"}), is_required=False),
        }

    def unpack(given: Tensors, shape: Shape) -> tuple[Tensor, Tensor]:
        _check_shape(given, shape)
        numbers = given["weight_packed"].contiguous().view(torch.uint8)[:, : shape[1]]
        return (numbers ^ 128).view(torch.int8), expanded_rows(given["weight_scale"], shape)

    return Format(
        name="compressed-tensors pack-quantized, 8 bits", scheme=INT8, tensors=tensors, unpack=unpack
    )
