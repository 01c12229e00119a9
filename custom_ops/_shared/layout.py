"""How tensors lie in memory, as far as kernels care."""

from torch import Tensor

from ...common.errors import ShapeError


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """x and its rows' stride in elements; a contiguous copy where the last two dimensions are not rows."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x, x.stride(0)
    return x.contiguous(), x.shape[-1]


def moves_in_vectors(table: Tensor, width: int) -> bool:
    """Whether rows can be copied in vectors of `width` elements, the last of which ends within the row."""
    unit = width * table.element_size()
    return (table.stride(0) | table.shape[1]) % width == 0 and table.data_ptr() % unit == 0


def num_rows(x: Tensor) -> int:
    """How many vectors of the last dimension's size x holds."""
    return x.shape[:-1].numel()


def with_dense_heads(x: Tensor) -> Tensor:
    """x, or a contiguous copy where the elements of its last dimension are not neighbours."""
    return x if x.stride(-1) == 1 else x.contiguous()


def check_dense_heads(op: str, *caches: Tensor) -> None:
    """Refuse caches, which are written in place, whose last dimension is not contiguous."""
    if any(cache.stride(-1) != 1 for cache in caches):
        got = ", ".join(str(list(cache.stride())) for cache in caches)
        raise ShapeError(f"{op}: caches have strides {got}; wanted a contiguous last dimension")
