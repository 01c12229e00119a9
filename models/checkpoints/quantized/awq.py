"""Checkpoints of AWQ's gemm: four bits a weight, zero points, packed along rows in an order of its own."""

from collections.abc import Mapping

from torch import Tensor

from ....common.errors import UnsupportedError
from ...fields import Fields
from ...quantization.packing import AWQ_ORDER
from ...quantization.scheme import Shape
from .dialect import HEAD, Dialect, aliases, refused, require
from .formats import FLOATS, INT32, Expected, Format, Tensors, four_bit_parts, four_bits, nibbles


def read(fields: Fields) -> Dialect:
    """The dialect that a config of AWQ describes.

    Raises ConfigError for a config that cannot be, UnsupportedError for what is not served, naming the field.
    """
    version = fields.text("version", "gemm")
    require(fields, "version", version.lower(), ("gemm",))
    bits = "bits" if "bits" in fields else "w_bit"
    require(fields, bits, fields.integer(bits, 4), (4,))
    size = "group_size" if "group_size" in fields else "q_group_size"
    if not fields.boolean("zero_point", True):
        raise refused(fields, "zero_point", False, "true")
    form = _format(fields, fields.integer(size, 128, minimum=-1))
    names = fields.texts("modules_to_not_convert")

    def format_of(module: str) -> Format | None:
        is_named = any(name in one for name in names for one in aliases(module))
        return None if module == HEAD or is_named else form

    return Dialect(name="awq", format_of=format_of)


def _format(fields: Fields, group: int) -> Format:
    try:
        scheme = four_bits(group, zero=True, order=False)
    except UnsupportedError as error:
        raise UnsupportedError(f"{fields.origin}: {error}") from error

    def tensors(shape: Shape) -> Mapping[str, Expected]:
        rows, columns = shape
        groups = 1 if group == -1 else columns // group
        return {
            "qweight": Expected(((columns, rows // 8),), INT32),
            "qzeros": Expected(((groups, rows // 8),), INT32),
            "scales": Expected(((groups, rows),), FLOATS),
        }

    def unpack(given: Tensors, shape: Shape) -> list[Tensor]:
        rows = shape[0]
        numbers, zeros = (nibbles(given[name], rows, 1, AWQ_ORDER).T for name in ("qweight", "qzeros"))
        return four_bit_parts(numbers.contiguous(), given["scales"].T, zeros, None)

    return Format(name="awq", scheme=scheme, tensors=tensors, unpack=unpack)
