"""The CUDA kernel of lamina::gelu_and_mul."""

from functools import partial

from ..cuda_kernel import DEVICES, DTYPES
from ..registry import Provider
from ..silu_and_mul._cuda import load

PROVIDER = Provider(
    name="cuda", load=partial(load, "gelu_and_mul"), devices=DEVICES, dtypes=frozenset(DTYPES)
)
