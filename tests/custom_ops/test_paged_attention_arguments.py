"""lamina::paged_attention: arguments that do not fit are refused by name, and what takes those that do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lamina.common.errors import ShapeError
from lamina.custom_ops import paged_attention
from lamina.custom_ops._shared.registry import select

MakeCase = Callable[..., Any]

CPU = torch.device("cpu")


def call_kernel(case: Any) -> None:
    select("paged_attention", device=CPU, dtype=case.query.dtype, provider="cpu").call(*case)


@pytest.mark.parametrize(
    "change",
    [
        {"seq_lens": [9, 3], "query_lens": [1, 5]},
        {"seq_lens": [9, 3], "block": 1000},
        {"seq_lens": [9, 3], "block": -1},
        {"seq_lens": [9, 3], "block": 7},  # as many as there are
        {"seq_lens": [9, 100]},
        {"seq_lens": [9, -4]},
    ],
)
def test_lengths_and_blocks_that_do_not_fit_are_refused_and_nothing_is_written(
    make_paged_case: MakeCase, change: dict[str, Any]
) -> None:
    case = make_paged_case([9, 5], change.get("query_lens", [1, 1]))
    case = case._replace(seq_lens=torch.tensor(change["seq_lens"], dtype=torch.int32))
    if "block" in change:
        case.block_tables[1, 0] = change["block"]
    with pytest.raises(ShapeError, match="sequence 1 has seq_len"):
        call_kernel(case)
    assert case.out.isnan().all()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"window": 0}, "window is 0"),
        ({"chunk": 0}, "chunk 0"),
        ({"soft_cap": -1.0}, "soft_cap -1"),
        ({"seq_lens": torch.tensor([5, 5])}, "wanted int32"),
        ({"query": torch.zeros(2, 3, 16)}, "query \\[2, 3, 16\\]"),
        ({"key_cache": torch.zeros(4, 4, 3, 16)}, "value_cache is"),
        ({"key_cache": torch.zeros(4, 4, 2, 16, dtype=torch.float16)}, "wanted one dtype|value_cache is"),
        ({"key_scale": 0.5}, r"key_scale is 0\.5.*wanted scales of 1"),
    ],
)
def test_arguments_that_do_not_fit_are_named(make_paged_case: MakeCase, change: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        paged_attention(*make_paged_case([5, 5], [1, 1])._replace(**change))


@pytest.mark.parametrize("name", ["out", "query", "key_cache", "value_cache", "block_tables"])
def test_the_kernel_refuses_a_last_dimension_that_is_not_contiguous(
    make_paged_case: MakeCase, name: str
) -> None:
    case = make_paged_case([5, 5], [1, 1])
    spread = torch.stack([getattr(case, name)] * 2, dim=-1)[..., 0]
    with pytest.raises(ShapeError, match="last dimension is contiguous"):
        call_kernel(case._replace(**{name: spread}))


def test_float64_is_served_by_the_formula_and_the_reason_is_said(make_paged_case: MakeCase) -> None:
    chosen = select("paged_attention", device=CPU, dtype=torch.float64)
    assert chosen.name == "reference"
    assert "cpu does not take torch.float64" in chosen.reason
