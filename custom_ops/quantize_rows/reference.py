"""The formula of lamina::quantize_rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._shared.fp8 import divided
from .._shared.quantized import INT8, LARGEST, num_groups

TINY = torch.finfo(torch.float32).tiny


def quantize_rows(x: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(q, s) with s = max(|x|) / largest of a row or of a group of its columns, and q = x / s rounded."""
    (num_tokens, columns), width, largest = x.shape, group or x.shape[1], LARGEST[dtype]
    groups = num_groups(columns) if group else 1
    wide = F.pad(x.to(torch.float32), (0, groups * width - columns)).view(num_tokens, groups, width)
    scale = divided(wide.abs().amax(dim=2).clamp_min(TINY), largest)
    steps = (wide / scale[:, :, None]).clamp(-largest, largest).view(num_tokens, groups * width)
    if dtype == INT8:
        steps = steps.round().nan_to_num(nan=0.0)
    values = steps[:, :columns].to(dtype, memory_format=torch.contiguous_format)
    return values, scale.t().contiguous().t() if group else scale[:, 0].contiguous()
