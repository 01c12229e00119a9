"""Checkpoints of GPTQ: four bits a weight, packed along the columns, as AutoGPTQ and GPTQModel write them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.errors import LoadError, UnsupportedError
from ...fields import Fields
from ...quantization.scheme import Shape
from .dialect import HEAD, Dialect, matches_expression, require
from .formats import FLOATS, INT32, Expected, Format, Tensors, four_bit_parts, four_bits, nibbles

# Zero points are stored less one (v1) or as they are (v2). Symmetric ones are 8, so the word says which.
WORD_V1, WORD_V2 = 0x77777777, -0x77777778


class Settings(NamedTuple):
    """What of the config may be otherwise for some modules."""

    bits: int
    group_size: int
    sym: bool
    desc_act: bool


def read(fields: Fields) -> Dialect:
    """The dialect that a config of GPTQ describes.

    Raises ConfigError for a config that cannot be, UnsupportedError for what is not served, naming the field.
    """
    version = fields.text("checkpoint_format", "gptq")
    require(fields, "checkpoint_format", version, ("gptq", "gptq_v2"))
    settings, has_head = _settings(fields, None), fields.boolean("lm_head", False)
    rules, listed = fields.object("dynamic"), _listed_modules(fields)
    formats: dict[Settings, Format] = {}

    def format_of(module: str) -> Format | None:
        own = _own_settings(fields, rules, settings, module)
        is_listed = not listed or any(module.endswith(f".{name}") for name in listed)
        if own is None or (module == HEAD and not has_head and own is settings):
            return None
        if module != HEAD and not is_listed:
            return None
        if own not in formats:
            formats[own] = _format(fields, own, version)
        return formats[own]

    if not rules:
        _format(fields, settings, version)  # refused at once
    return Dialect(name="gptq", format_of=format_of)


def _settings(fields: Fields, base: Settings | None) -> Settings:
    """Those of a config, or of a rule for some modules, which says what is otherwise."""
    bits = fields.integer("bits", base.bits if base else 4)
    group_size = fields.integer("group_size", base.group_size if base else 128, minimum=-1)
    sym = fields.boolean("sym", base.sym if base else True)
    desc_act = fields.boolean("desc_act", base.desc_act if base else False)
    return Settings(bits, group_size, sym, desc_act)


def _own_settings(fields: Fields, rules: Mapping[str, Any], base: Settings, module: str) -> Settings | None:
    """The settings of a module by the first rule that is about it; None where that is to leave it alone."""
    for pattern, rule in rules.items():
        if matches_expression(fields, "dynamic", pattern.removeprefix("-:").removeprefix("+:"), module):
            if pattern.startswith("-:"):
                return None
            if not isinstance(rule, dict):
                raise fields.error(f"dynamic[{pattern!r}]", rule, "an object")
            return _settings(Fields(rule, f"{fields.origin}: dynamic[{pattern!r}]"), base)
    return base


def _listed_modules(fields: Fields) -> tuple[str, ...]:
    """The modules of a layer that are quantized; empty: all."""
    lists = fields.values.get("modules_in_block_to_quantize") or ()
    is_list = isinstance(lists, (list, tuple))
    names = [name for one in lists for name in (one if isinstance(one, list) else [one])] if is_list else []
    if not is_list or not all(isinstance(name, str) for name in names):
        raise fields.error("modules_in_block_to_quantize", lists, "lists of names")
    return tuple(names)


def _format(fields: Fields, settings: Settings, version: str) -> Format:
    bits, group, sym, desc_act = settings
    require(fields, "bits", bits, (4,))
    try:
        scheme = four_bits(group, zero=not sym, order=desc_act)
    except UnsupportedError as error:
        raise UnsupportedError(f"{fields.origin}: {error}") from error
    is_ordered = desc_act and group != -1

    def tensors(shape: Shape) -> Mapping[str, Expected]:
        rows, columns = shape
        groups = 1 if group == -1 else columns // group
        return {
            "qweight": Expected(((columns // 8, rows),), INT32),
            "qzeros": Expected(((groups, -(-rows // 8)),), INT32),
            "scales": Expected(((groups, rows),), FLOATS),
            "g_idx": Expected(((columns,),), INT32, is_required=is_ordered),
        }

    def unpack(given: Tensors, shape: Shape) -> list[Tensor]:
        rows, columns = shape
        zeros = _zero_points(given["qzeros"], rows, version, is_symmetric=sym)
        numbers = nibbles(given["qweight"], columns, dim=0).T.contiguous()
        group_of = given.get("g_idx")
        if group_of is not None and not is_ordered:
            _check_order(group_of, columns if group == -1 else group)
            group_of = None
        return four_bit_parts(numbers, given["scales"].T, zeros, group_of)

    return Format(name=f"{version}", scheme=scheme, tensors=tensors, unpack=unpack)


def _zero_points(words: Tensor, rows: int, version: str, *, is_symmetric: bool) -> Tensor | None:
    """The zero points [out, groups] from 0 to 16, None for symmetric ones, which are 8.

    Checkpoints have been published as v1 that are v2, so symmetric words themselves say which they are.
    """
    if not is_symmetric:
        stored = nibbles(words, rows, dim=1).T
        return stored + 1 if version == "gptq" else stored
    own = words[:, : rows // 8]  # a short last word ends in anything
    if not any(bool((own == word).all()) for word in (WORD_V1, WORD_V2)):
        raise LoadError("has qzeros other than 8 (0x77777777 or 0x88888888) though sym is true")
    return None


def _check_order(group_of: Tensor, group: int) -> None:
    expected = torch.arange(group_of.shape[0], device=group_of.device) // group
    if not torch.equal(group_of, expected.to(group_of.dtype)):
        raise LoadError("has a g_idx that is out of order though desc_act is false")
