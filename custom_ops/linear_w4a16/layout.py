"""How weights of four or eight bits lie: by rows, or shuffled as the tensor cores take them.

Shuffled, a tile of 64 rows by 64 columns is 2 KiB in one piece, the tiles of 64 rows one after another. Of
a tile each lane of a warpgroup has 16 bytes: a word of eight weights for each 16 columns, which is what it
gives to WGMMA as its part of the left operand. Its two rows are r and r + 8 of its warp's 16, its columns 2p,
2p + 1, 2p + 8 and 2p + 9, with r = lane / 4 and p = lane % 4. A word's lower half has even columns, its upper
half the odd ones, each as (r, 2p), (r + 8, 2p), (r, 2p + 8), (r + 8, 2p + 8) from the lowest bits on: so a
shift and a mask leave two neighbours where a register of two 16-bit elements has them.

Weights of eight bits are shuffled by tiles of 64 rows by 32 columns, 2 KiB as well. A lane has two words for
each 16 columns, of (r, 2p), (r + 8, 2p), (r, 2p + 1), (r + 8, 2p + 1) from the lowest byte on, and of the
same rows in columns 2p + 8 and 2p + 9.

Scales and zero points are shuffled to the same tiles: of each group 64 in one piece, in which those of a
lane's two rows are neighbours. csrc/linear_w4a16 reads both; all shapes stay what they were.
"""

import torch
from torch import Tensor

TILE = 64  # rows, and columns
GROUPS = tuple(32 << shift for shift in range(12))  # columns with one scale that the CUDA kernel counts
NARROW = (torch.bfloat16, torch.float16)
AT_ONCE = 1 << 24  # weights
OFFSET = 8  # of four bits: 0 to 15 stand for -8 to 7


def is_kept_shuffled(n: int, k: int, group: int, dtype: torch.dtype, device_type: str) -> bool:
    """Whether weights lie as the CUDA kernel reads them: on GPUs, all that it takes.

    That is for a scheme to ask, as it lays weights out and as it multiplies: what decides is known to both.
    """
    is_counted = group in GROUPS or group in (-1, k)
    fits = n % TILE == 0 and k % TILE == 0 and is_counted
    return fits and device_type == "cuda" and dtype in NARROW


def unpack(weight: Tensor) -> Tensor:
    """The four bits of each weight, [rows, columns] uint8, of bytes [rows, columns / 2]."""
    return torch.stack((weight & 15, weight >> 4), dim=-1).flatten(-2)


def pack(values: Tensor) -> Tensor:
    """Bytes [rows, columns / 2] of whole numbers from 0 to 15, [rows, columns] uint8."""
    return values[..., 0::2] | (values[..., 1::2] << 4)


def bits_of(weight: Tensor) -> int:
    """Bits of one weight: whole numbers of eight are int8, pairs of four uint8."""
    return 8 if weight.dtype == torch.int8 else 4


def columns_of(weight: Tensor) -> int:
    """How many columns weights [rows, columns] int8, or [rows, columns / 2] uint8, stand for."""
    return weight.shape[1] if bits_of(weight) == 8 else 2 * weight.shape[1]


def numbers_of(weight: Tensor) -> Tensor:
    """What each weight is before its scale, int8 [rows, columns]: of four bits -8 to 7."""
    return weight if bits_of(weight) == 8 else unpack(weight).to(torch.int8) - OFFSET


def shuffle(weight: Tensor) -> Tensor:
    """Weights of a shape as the CUDA kernel reads them, for multiples of 64 rows and columns."""
    if bits_of(weight) == 8:
        return _shuffle_bytes(weight)
    rows, columns = weight.shape[0], weight.shape[1] * 2
    # row tile, warp, row or row + 8, row; column tile, step, 2p or 2p + 8, p, even or odd
    parts = unpack(weight).view(rows // TILE, 4, 2, 8, columns // TILE, 4, 2, 4, 2)
    return pack(parts.permute(0, 4, 1, 3, 7, 5, 8, 6, 2).reshape(rows, columns))


def shuffle_in_place(weight: Tensor, scale: Tensor, zero: Tensor | None) -> None:
    """All three, some rows at a time: memory for a few million weights is enough."""
    step = max(TILE, AT_ONCE // columns_of(weight) // TILE * TILE)
    for start in range(0, weight.shape[0], step):
        rows = weight[start : start + step]
        rows.copy_(shuffle(rows))
    for part in (scale,) if zero is None else (scale, zero):
        part.copy_(shuffle_groups(part))


def unshuffle(weight: Tensor) -> Tensor:
    """What `shuffle` was given."""
    if bits_of(weight) == 8:
        return _unshuffle_bytes(weight)
    rows, columns = weight.shape[0], weight.shape[1] * 2
    parts = unpack(weight).view(rows // TILE, columns // TILE, 4, 8, 4, 4, 2, 2, 2)
    return pack(parts.permute(0, 2, 8, 3, 1, 5, 7, 4, 6).reshape(rows, columns))


def _shuffle_bytes(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    # row tile, warp, row or row + 8, row; column tile, step, 2p or 2p + 8, p, even or odd
    parts = weight.view(rows // TILE, 4, 2, 8, columns // 32, 2, 2, 4, 2)
    return parts.permute(0, 4, 1, 3, 7, 5, 6, 8, 2).reshape(rows, columns)


def _unshuffle_bytes(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    parts = weight.view(rows // TILE, columns // 32, 4, 8, 4, 2, 2, 2, 2)
    return parts.permute(0, 2, 8, 3, 1, 5, 6, 4, 7).reshape(rows, columns)


def shuffle_groups(scale: Tensor) -> Tensor:
    """Scales or zero points [rows, groups] as the CUDA kernel reads them, for a multiple of 64 rows."""
    rows, groups = scale.shape
    return scale.view(rows // TILE, 4, 2, 8, groups).permute(0, 4, 1, 3, 2).reshape(rows, groups)


def unshuffle_groups(scale: Tensor) -> Tensor:
    """What `shuffle_groups` was given."""
    rows, groups = scale.shape
    return scale.view(rows // TILE, groups, 4, 8, 2).permute(0, 2, 4, 3, 1).reshape(rows, groups)
