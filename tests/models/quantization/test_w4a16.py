"""Projections in four bits: how they lie on a GPU, and what they multiply to there."""

import pytest
import torch

from lamina.custom_ops.linear_w4a16 import layout
from lamina.models.quantization import w4a16
from lamina.models.quantization.w4a16 import Layout


@pytest.mark.parametrize(
    "n, k, group, dtype, device_type, is_shuffled",
    [
        (128, 192, 32, torch.bfloat16, "cuda", True),
        (128, 192, 192, torch.float16, "cuda", True),
        (128, 192, -1, torch.bfloat16, "cuda", True),
        (128, 192, 96, torch.bfloat16, "cuda", False),  # a group that the kernel does not count
        (96, 192, 64, torch.bfloat16, "cuda", False),  # no whole tiles
        (128, 96, 32, torch.bfloat16, "cuda", False),
        (128, 192, 64, torch.float32, "cuda", False),  # nothing for tensor cores
        (128, 192, 64, torch.bfloat16, "cpu", False),
    ],
)
def test_weights_are_shuffled_where_the_kernel_takes_them(
    n: int, k: int, group: int, dtype: torch.dtype, device_type: str, is_shuffled: bool
) -> None:
    assert layout.is_kept_shuffled(n, k, group, dtype, device_type) == is_shuffled


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("group", [None, 64, -1])
def test_settled_parts_multiply_to_the_same(
    monkeypatch: pytest.MonkeyPatch, group: int | None, zero: bool, order: bool, bits: int
) -> None:
    """As on a GPU: parts lie otherwise, and the op is told."""
    scheme, n, k = Layout(group, zero, order, bits), 192, 384
    generator = torch.Generator().manual_seed(1)
    table = scheme.tensors((n, k), torch.bfloat16)
    parts = [torch.empty(shape, dtype=dtype) for shape, dtype in table.values()]
    scheme.store(torch.randn(n, k, generator=generator), parts)
    if zero:
        parts[2].normal_(generator=generator)
    if order:
        parts[-1].copy_(torch.randperm(k, generator=generator))
    x, bias = (
        torch.randn(5, k, generator=generator).bfloat16(),
        torch.randn(n, generator=generator).bfloat16(),
    )
    right, before = scheme.multiply(x, parts, bias), [part.clone() for part in parts]
    scheme.settle(parts)
    assert all(torch.equal(part, old) for part, old in zip(parts, before, strict=True))  # on a CPU
    monkeypatch.setattr(w4a16, "_is_shuffled", lambda packed, scale: True)
    monkeypatch.setattr(layout, "AT_ONCE", 1 << 15)  # weights: some rows at a time
    scheme.settle(parts)
    assert not torch.equal(parts[0], before[0])
    assert torch.equal(scheme.multiply(x, parts, bias), right)
