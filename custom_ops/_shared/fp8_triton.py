"""FP8 (e4m3) in Triton kernels, by its bits, which every GPU has: tensors are uint8."""

import triton
import triton.language as tl


@triton.jit
def widen(stored, dtype: tl.constexpr):
    """Elements of a cache in the dtype that they are multiplied in; each FP8 number is one of these."""
    if stored.dtype == tl.uint8:
        byte = stored.to(tl.uint16)
        # exponents count from 7 in place of float16's 15
        small = (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.float16, bitcast=True)
        number = tl.where((byte & 0x7F) == 0x7F, float("nan"), small.to(tl.float32) * 256.0)
        return number.to(dtype)
    else:  # noqa: RET505 - or Triton takes both for what comes back
        return stored


@triton.jit
def narrow(rows, scale, cache):
    """Rows as a cache stores them: where it is bytes, divided by the scale and rounded to FP8."""
    if cache.dtype.element_ty == tl.uint8:
        number = tl.div_rn(rows.to(tl.float32), tl.zeros(rows.shape, tl.float32) + scale)
        size = tl.minimum(tl.abs(number), 448.0)
        bits = size.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # in units of 2^-9, which are those of a float from 2^14 on
        subnormal = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        sign = (number.to(tl.uint32, bitcast=True) >> 24) & 0x80
        byte = tl.where(size < 0.015625, subnormal, normal) | sign
        return tl.where(number == number, byte, 0x7F).to(tl.uint8)
    else:  # noqa: RET505 - or Triton takes both for what comes back
        return rows
