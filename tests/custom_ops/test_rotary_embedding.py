"""lamina::rotary_embedding."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from lamina.common.errors import ShapeError
from lamina.custom_ops import rotary_embedding


def tables(
    num_tokens: int, half: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(num_tokens, half, dtype=dtype) * 100
    return angles.cos(), angles.sin()


def by_transformers(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    whole = [torch.cat([table, table], -1)[None] for table in (cos, sin)]
    heads_first = x.transpose(0, 1)[None]
    return apply_rotary_pos_emb(heads_first, heads_first, *whole)[0][0].transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_what_transformers_computes(dtype: torch.dtype) -> None:
    query, key = torch.randn(5, 4, 16, dtype=dtype), torch.randn(5, 2, 16, dtype=dtype)
    cos, sin = tables(5, 8, dtype)
    rotated = rotary_embedding(query, key, cos, sin)
    for ours, x in zip(rotated, (query, key), strict=True):
        torch.testing.assert_close(ours, by_transformers(x, cos, sin))


def test_halves_are_rounded_once() -> None:
    query, key = torch.randn(5, 4, 16).bfloat16(), torch.randn(5, 2, 16).bfloat16()
    cos, sin = tables(5, 8)
    exact = rotary_embedding(query.float(), key.float(), cos, sin)
    for ours, wide in zip(rotary_embedding(query, key, cos, sin), exact, strict=True):
        assert torch.equal(ours, wide.bfloat16())


def test_views_of_one_tensor_give_contiguous_results() -> None:
    qkv = torch.randn(5, 8, 16)
    cos, sin = tables(5, 8)
    arguments = (qkv[:, :4], qkv[:, 4:6], cos, sin)
    rotated = rotary_embedding(*arguments)
    assert all(x.is_contiguous() for x in rotated)
    torch.library.opcheck(torch.ops.lamina.rotary_embedding.default, arguments)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"key": torch.zeros(4, 2, 16)}, r"key \[4, 2, 16\]"),
        ({"cos": torch.zeros(5, 16)}, r"cos is \[5, 16\]"),
        ({"sin": torch.zeros(5, 8, dtype=torch.float64)}, "sin torch.float64"),
        ({"key": torch.zeros(5, 2, 16).half()}, "key is torch.float16"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, torch.Tensor], message: str) -> None:
    fitting = {"query": torch.zeros(5, 4, 16), "key": torch.zeros(5, 2, 16)}
    fitting |= {"cos": torch.zeros(5, 8), "sin": torch.zeros(5, 8)}
    with pytest.raises(ShapeError, match=message):
        rotary_embedding(**fitting | change)
