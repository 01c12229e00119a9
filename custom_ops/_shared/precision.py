"""The dtype in which every formula of the ops is evaluated."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32; results are rounded once to the input's dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
