"""The CUDA kernel of lamina::add_zero_centred_rms_norm."""

from functools import partial

from ..add_rms_norm._cuda import load
from ..cuda_kernel import DEVICES, DTYPES
from ..registry import Provider

PROVIDER = Provider(
    name="cuda",
    load=partial(load, "add_zero_centred_rms_norm"),
    devices=DEVICES,
    dtypes=frozenset(DTYPES),
)
