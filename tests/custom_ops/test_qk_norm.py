"""lamina::qk_norm."""

import pytest
import torch

from lamina.common.errors import ShapeError
from lamina.custom_ops import qk_norm, rms_norm, zero_centred_rms_norm


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_it_is_the_norm_of_every_head_of_both(dtype: torch.dtype, zero_centred: bool) -> None:
    heads = (torch.randn(5, 8, 16) * 3).to(dtype)
    query, key = heads[:, :4], heads[:, 4:6]
    weights = torch.randn(16).to(dtype), torch.randn(16).to(dtype)
    arguments = (query, key, *weights, 1e-5, zero_centred)
    norm = zero_centred_rms_norm if zero_centred else rms_norm
    for out, part, weight in zip(qk_norm(*arguments), (query, key), weights, strict=True):
        assert torch.equal(out, norm(part, weight, 1e-5))
        assert out.is_contiguous()
    torch.library.opcheck(torch.ops.lamina.qk_norm.default, arguments)


def test_what_does_not_fit_is_named() -> None:
    query, key, weight = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8), torch.zeros(8)
    with pytest.raises(ShapeError, match=r"key \[2, 2, 8\]; wanted \[T, heads, D\]"):
        qk_norm(query, key[1:], weight, weight, 1e-5, False)
    with pytest.raises(ShapeError, match="qk_norm: weight is"):
        qk_norm(query, key, weight, weight[1:], 1e-5, False)
    with pytest.raises(ShapeError, match=r"wanted query's torch\.float32"):
        qk_norm(query, key.double(), weight, weight, 1e-5, False)
