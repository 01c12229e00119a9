"""The formula of lamina::lora."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._shared.precision import accumulation_dtype


def lora(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int]
) -> Tensor:
    """y + scale * (x @ a.T) @ b.T of each row's slot, part by part; rows without a slot stay as they are."""
    wide, rank, out = accumulation_dtype(y.dtype), b.shape[2], y.clone()
    own, given = slots[: len(y), None], x.to(wide)
    for slot in range(len(a)):  # all of them, whoever uses which: nothing of it is read on the host
        first = 0
        for part, count in enumerate(rows):
            columns, scale = slice(first, first + count), scales[slot, part].to(wide)
            shrunk = given @ a[slot, part * rank : (part + 1) * rank].to(wide).T
            delta = (shrunk @ b[slot, columns].to(wide).T) * scale
            changed = (y[:, columns].to(wide) + delta).to(y.dtype)
            out[:, columns] = torch.where((own == slot) & (scale != 0), changed, out[:, columns])
            first += count
    return out
