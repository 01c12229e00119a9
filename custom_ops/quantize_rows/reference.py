"""The formula of lamina::quantize_rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._shared.fp8 import FP8, LARGEST, divided, num_groups

TINY = torch.finfo(torch.float32).tiny


def quantize_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(q, s) with s = max(|x|) / 448 of a row or of a group of its columns, and q = x / s rounded to e4m3."""
    (num_tokens, columns), width = x.shape, group or x.shape[1]
    groups = num_groups(columns) if group else 1
    wide = F.pad(x.to(torch.float32), (0, groups * width - columns)).view(num_tokens, groups, width)
    scale = divided(wide.abs().amax(dim=2).clamp_min(TINY), LARGEST)
    steps = (wide / scale[:, :, None]).clamp(-LARGEST, LARGEST).view(num_tokens, groups * width)
    values = steps[:, :columns].to(FP8, memory_format=torch.contiguous_format)
    return values, scale.t().contiguous().t() if group else scale[:, 0].contiguous()
