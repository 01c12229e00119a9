"""Weights quantized on a GPU and on a CPU: the same bits."""

import pytest
import torch
from torch import Tensor

from lamina.models.quantization.scheme import find_scheme, scheme_names

pytestmark = pytest.mark.gpu


def bits(part: Tensor) -> Tensor:
    """A part's bytes, on the CPU."""
    return part.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", [name for name in scheme_names() if "cuda" in find_scheme(name).devices])
def test_rows_become_the_same_bits_on_every_device(name: str) -> None:
    scheme = find_scheme(name)
    rows = torch.randn(256, 1024) * torch.rand(256, 1)
    table = scheme.tensors((256, 1024), torch.bfloat16)
    stored = []
    for device in ("cpu", "cuda"):
        parts = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in table.values()]
        scheme.store(rows.to(device), parts)
        stored.append([bits(part) for part in parts])
    for on_cpu, on_gpu in zip(*stored, strict=True):
        assert torch.equal(on_cpu, on_gpu)
