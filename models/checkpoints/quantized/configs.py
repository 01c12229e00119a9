"""Where a checkpoint says how it is quantized, and the dialect that it says so in."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...fields import Fields, read_json
from . import awq, bitsandbytes, compressed_tensors, float8, gguf_blocks, gptq
from .dialect import Dialect, refused

READERS: Mapping[str, Callable[[Fields], Dialect]] = {
    "compressed-tensors": compressed_tensors.read,
    "fp8": float8.read_fp8,
    "fbgemm_fp8": float8.read_fbgemm,
    "modelopt": float8.read_modelopt,
    "gptq": gptq.read,
    "awq": awq.read,
    "bitsandbytes": bitsandbytes.read,
    gguf_blocks.METHOD: gguf_blocks.read,
}
FIELD = "quantization_config"
# Files beside config.json that some tools write, and the method of those that do not say it.
FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}


def read_dialect(folder: Path) -> Dialect | None:
    """How a checkpoint folder is quantized, None where nothing says that it is.

    Raises ConfigError for a config that cannot be, UnsupportedError for what is not served, naming the field.
    """
    path = folder / "config.json"
    config = Fields(read_json(path), str(path)) if os.path.lexists(path) else Fields({}, str(path))
    found = _in_config(config)
    if found is not None:
        return _read(found, None)
    for name, method in FILES.items():
        if os.path.lexists(folder / name):
            return _read(Fields(read_json(folder / name), str(folder / name)), method)
    return None


def _in_config(config: Fields) -> Fields | None:
    """The object in config.json, or in what it says of the text model, or by its older name."""
    for outer in (config, Fields(config.object("text_config"), f"{config.origin}: text_config")):
        for field in (FIELD, "compression_config"):
            values: dict[str, Any] = outer.object(field)
            inner = values.get(FIELD)
            if field == "compression_config" and isinstance(inner, dict):
                values = {**values, **inner, "quant_method": "compressed-tensors"}
            if values:
                return Fields(values, f"{outer.origin}: {field}")
    return None


def _read(fields: Fields, default: str | None) -> Dialect:
    method = fields.text("quant_method", default)
    if method not in READERS:
        raise refused(fields, "quant_method", method, ", ".join(map(repr, READERS)))
    return READERS[method](fields)
