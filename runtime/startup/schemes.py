"""How a model's projections are kept: as its checkpoint says, else as the setting asks."""

from collections.abc import Mapping
from pathlib import Path

from ...common.errors import UnsupportedError
from ...models.checkpoints.quantized.configs import read_dialect
from ...models.checkpoints.quantized.modules import own_schemes, quantized_modules
from ...models.quantization.model_schemes import ModelSchemes, uniform
from ...models.quantization.scheme import find_scheme
from ...models.registry import ParameterSpec


def resolve_schemes(
    quantization: str | None, folder: Path, specs: Mapping[str, ParameterSpec]
) -> ModelSchemes:
    """What the checkpoint's own config says, else what the setting asks for.

    Raises UnsupportedError where both say something, and not the same.
    """
    dialect = read_dialect(folder)
    if dialect is None:
        return uniform(find_scheme(quantization), specs)
    own = own_schemes(dialect, quantized_modules(dialect, specs), specs)
    if quantization not in (None, own.name, *{scheme.name for scheme in own.schemes.values()}):
        raise UnsupportedError(
            f"quantization is {quantization!r}, and the checkpoint {folder} is quantized already "
            f"({dialect.name}); use quantization=None, or the checkpoint that it was made of"
        )
    return own
