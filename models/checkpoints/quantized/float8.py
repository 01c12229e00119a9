"""Checkpoints in float8 as transformers (fp8, fbgemm_fp8) and NVIDIA's modelopt write them."""

from fnmatch import fnmatch

from ...fields import Fields
from .dialect import HEAD, Dialect, FormatOf, aliases, is_named, refused, require, static_scales
from .formats import Format, float8_blocks, float8_rows
from .nvfp4 import nvfp4

ACTIVATIONS = ("input_scale|activation_scale",)
MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4")


def read_fp8(fields: Fields) -> Dialect:
    """`fp8`: a scale for all weights of a module, or for each block of 128 by 128."""
    require(fields, "fmt", fields.text("fmt", "e4m3"), ("e4m3", "float8_e4m3fn", "float8_e4m3"))
    notes = static_scales(fields, "activation_scheme", fields.text("activation_scheme", "dynamic"))
    notes += _scales_of_powers(fields)
    block = fields.values.get("weight_block_size")
    if block is None:
        form = float8_rows("fp8", "weight_scale|weight_scale_inv", ACTIVATIONS)
    else:
        require(fields, "weight_block_size", block, ([128, 128],))
        form = float8_blocks("fp8, by blocks", "weight_scale_inv|weight_scale", ACTIVATIONS)
    names = (*fields.texts("modules_to_not_convert"), *fields.texts("ignored_layers"))
    return Dialect(name="fp8", format_of=_unless_named(form, names), notes=notes)


def _scales_of_powers(fields: Fields) -> tuple[str, ...]:
    """The note for activations whose scales the checkpoint has rounded up to powers of two."""
    kind = fields.text("scale_fmt", None)
    require(fields, "scale_fmt", kind, (None, "ue8m0", "float"))
    if kind != "ue8m0":
        return ()
    return ("scales of activations are not rounded up to powers of two, as scale_fmt 'ue8m0' has them",)


def read_fbgemm(fields: Fields) -> Dialect:
    """`fbgemm_fp8`: a scale a row, activations within a bound."""
    bound = fields.number("activation_scale_ub", None, positive=True)
    form = float8_rows("fbgemm_fp8", "weight_scale", ("input_scale_ub",), bound)
    names = fields.texts("modules_to_not_convert")
    return Dialect(name="fbgemm_fp8", format_of=_unless_named(form, names))


def _unless_named(form: Format, names: tuple[str, ...]) -> FormatOf:
    """The format of every module but the LM head and those that are named."""
    return lambda module: None if module == HEAD or is_named(module, names) else form


def read_modelopt(fields: Fields) -> Dialect:
    """modelopt, from config.json or hf_quant_config.json."""
    inner = fields.object("quantization")
    own = Fields(inner, f"{fields.origin}: quantization") if inner else fields
    algorithm = own.text("quant_algo", None)
    excluded = (*own.texts("exclude_modules"), *own.texts("ignore"))
    form = _modelopt_format(own, algorithm)
    notes = static_scales(own, "activations", "static" if algorithm == "FP8" else None)

    def format_of(module: str) -> Format | None:
        return None if any(_is_excluded(module, pattern) for pattern in excluded) else form

    return Dialect(name="modelopt", format_of=format_of, notes=notes)


def _modelopt_format(fields: Fields, algorithm: str | None) -> Format | None:
    if algorithm is None:
        return None  # the KV cache alone has scales
    name = f"modelopt {algorithm}"
    if algorithm == "NVFP4":
        require(fields, "group_size", fields.integer("group_size", 16), (16,))
        return nvfp4(name, "weight", "weight_scale_2", divide=False)
    if algorithm not in MODELOPT:
        raise refused(fields, "quant_algo", algorithm, " or ".join(map(repr, MODELOPT)))
    return float8_rows(name, "weight_scale", ("input_scale",))


def _is_excluded(module: str, pattern: str) -> bool:
    """By a pattern of fnmatch, or by the name of a module that it lies in."""
    return any(
        fnmatch(name, pattern) or name == pattern or name.startswith(f"{pattern}.")
        for name in aliases(module)
    )
