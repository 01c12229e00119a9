"""The CUDA kernel of lamina::add_zero_centred_rms_norm."""

from functools import partial

from .._shared.cuda_kernel import DEVICES, DTYPES
from .._shared.registry import Provider
from ..add_rms_norm._cuda import load

PROVIDER = Provider(
    name="cuda",
    load=partial(load, "add_zero_centred_rms_norm"),
    devices=DEVICES,
    dtypes=frozenset(DTYPES),
)
