"""Which caches of keys and values go with which tensors: of their own dtype, in FP8, or in int8 on a CPU."""

import torch
from torch import Tensor

from ...common.errors import ShapeError, UnsupportedError
from .._shared.fp8_cache import WIDE, check_cache_dtypes, check_cache_scales
from .int8_rows import INT8


def check_stored(
    op: str,
    dtypes: tuple[torch.dtype, torch.dtype],  # of what is written, or of queries and results
    caches: tuple[Tensor, Tensor],  # of keys, of values
    scales: tuple[float, float],
) -> None:
    """ShapeError for dtypes and scales that do not go together, UnsupportedError for int8 but on a CPU."""
    keys, values = (cache.dtype for cache in caches)
    if not keys == values == INT8 or INT8 in dtypes:
        check_cache_dtypes(op, *dtypes, keys, values)
        check_cache_scales(op, keys, *scales)
        return
    if caches[0].device.type not in ("cpu", "meta"):
        raise UnsupportedError(f"{op}: the cache is {INT8} on {caches[0].device.type}; wanted a cpu")
    if dtypes[0] != dtypes[1] or dtypes[0] not in WIDE or scales != (1.0, 1.0):
        got = f"tensors are {dtypes[0]}, {dtypes[1]}, scales {scales}, caches {INT8}"
        raise ShapeError(f"{op}: {got}; wanted one dtype of numbers with a fraction, and scales of 1")
