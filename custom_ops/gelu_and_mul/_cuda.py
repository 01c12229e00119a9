"""The CUDA kernel of lamina::gelu_and_mul."""

from functools import partial

from .._shared.cuda_kernel import DEVICES, DTYPES
from .._shared.registry import Provider
from ..silu_and_mul._cuda import load

PROVIDER = Provider(
    name="cuda", load=partial(load, "gelu_and_mul"), devices=DEVICES, dtypes=frozenset(DTYPES)
)
