"""lamina::lora."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina.common.errors import ShapeError
from lamina.custom_ops import lora
from lamina.custom_ops._shared import registry
from lamina.custom_ops.lora.reference import lora as formula

from .guarded import at_the_end, making_ended

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SUM_ERROR = 2e-6  # of a sum of float32, by the sum of its terms' sizes
FEATURES = st.integers(1, 70) | st.sampled_from([127, 128, 129, 300, 576])
PARTS = st.lists(st.integers(1, 40) | st.sampled_from([255, 256, 257]), min_size=1, max_size=4)
RANKS = st.integers(1, 20) | st.sampled_from([32, 64])


@dataclass(frozen=True)
class Operands:
    y: Tensor
    x: Tensor
    a: Tensor
    b: Tensor
    scales: Tensor
    slots: Tensor
    rows: tuple[int, ...]

    def each(self, **changed: Any) -> tuple[Any, ...]:
        return tuple({**vars(self), **changed}.values())


def operands(
    num_tokens: int,
    columns: int,
    rows: tuple[int, ...],
    dtype: torch.dtype,
    *,
    rank: int = 4,
    num_slots: int = 3,
    seed: int = 0,
) -> Operands:
    """Rows of y and x that lie apart with NaN between them; some parts of a slot change nothing."""
    generator = torch.Generator().manual_seed(seed)

    def apart(width: int) -> Tensor:
        wide = torch.full((num_tokens, width + 5), torch.nan, dtype=dtype)
        values = wide[:, 2 : width + 2]
        return values.copy_(torch.randn(values.shape, generator=generator))

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    scales = torch.rand(num_slots, len(rows), generator=generator) * 3
    scales[torch.rand(scales.shape, generator=generator) < 0.2] = 0.0
    return Operands(
        y=apart(sum(rows)),
        x=apart(columns),
        a=random(num_slots, len(rows) * rank, columns),
        b=random(num_slots, sum(rows), rank),
        scales=scales,
        slots=torch.randint(-1, num_slots, (num_tokens + 3,), generator=generator, dtype=torch.int32),
        rows=rows,
    )


def check(result: Tensor, given_: Operands) -> None:
    """Rounded once from sums that are as good as sums in float32 are."""
    wide = {name: getattr(given_, name).double() for name in ("y", "x", "a", "b", "scales")}
    exact = formula(*given_.each(**wide))
    sizes = formula(*given_.each(**{name: value.abs() for name, value in wide.items()}))
    allowed = exact.abs() * torch.finfo(result.dtype).eps / 2 + sizes * SUM_ERROR
    assert ((result.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("provider", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@given(
    num_tokens=st.integers(0, 9) | st.just(40),
    columns=FEATURES,
    rows=PARTS,
    rank=RANKS,
    seed=st.integers(0, 99),
)
def test_a_token_gets_what_its_own_slot_adds_rounded_once(
    provider: str, dtype: torch.dtype, num_tokens: int, columns: int, rows: list[int], rank: int, seed: int
) -> None:
    given_ = operands(num_tokens, columns, tuple(rows), dtype, rank=rank, seed=seed)
    call = registry.select("lora", device=torch.device("cpu"), dtype=dtype, provider=provider).call
    result = call(*given_.each())
    assert result.shape == given_.y.shape
    assert result.dtype == dtype
    check(result, given_)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_it_is_the_projection_by_weights_that_were_merged(dtype: torch.dtype) -> None:
    """The same sum as that of W + scale * B A, but for rounding."""
    given_ = operands(7, 33, (20, 9), torch.float64, rank=3)
    weight = torch.randn(29, 33, dtype=torch.float64)
    slots = torch.tensor([0, 1, 2, -1, 1, 0, 2], dtype=torch.int32)
    x = given_.x.to(dtype)
    found = lora(
        (x.double() @ weight.T).to(dtype),
        x,
        given_.a.to(dtype),
        given_.b.to(dtype),
        given_.scales,
        slots,
        given_.rows,
    )
    for token, slot in enumerate(slots.tolist()):
        merged = weight.clone()
        for part, own in enumerate((slice(0, 20), slice(20, 29)) if slot >= 0 else ()):
            a = given_.a[slot, 3 * part : 3 * part + 3]
            merged[own] += given_.scales[slot, part] * given_.b[slot, own] @ a
        wanted, room = merged @ x[token].double(), 40 * torch.finfo(dtype).eps
        torch.testing.assert_close(found[token].double(), wanted, rtol=room, atol=room * 10)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_rows_without_a_slot_and_parts_of_scale_0_keep_their_bits(dtype: torch.dtype) -> None:
    """Whatever lies in the slots: NaN from a slot that nobody uses would otherwise reach everybody."""
    given_ = operands(5, 17, (8, 6), dtype, num_slots=2)
    given_.a[1:] = torch.nan
    given_.scales[:] = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    given_.y[0, 0] = -0.0
    slots = torch.tensor([-1, 0, -1, 0, -1], dtype=torch.int32)
    found = lora(*given_.each(slots=slots))
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[given_.y.element_size()]
    before, after = given_.y.contiguous().view(kind), found.view(kind)
    assert torch.equal(after[::2], before[::2])
    assert torch.equal(after[1::2, :8], before[1::2, :8])
    assert not torch.equal(after[1::2, 8:], before[1::2, 8:])
    assert found.isfinite().all()


@given(num_tokens=st.integers(2, 40), columns=FEATURES, rows=PARTS, rank=RANKS, dtype=st.sampled_from(DTYPES))
def test_a_token_has_the_bits_that_it_has_alone(
    num_tokens: int, columns: int, rows: list[int], rank: int, dtype: torch.dtype
) -> None:
    given_ = operands(num_tokens, columns, tuple(rows), dtype, rank=rank)
    together = lora(*given_.each())
    for token in {0, num_tokens // 2, num_tokens - 1}:
        one = slice(token, token + 1)
        alone = lora(*given_.each(y=given_.y[one], x=given_.x[one], slots=given_.slots[one].clone()))
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_call_gives_the_same_bits_on_any_number_of_threads(threads: int) -> None:
    given_ = operands(20, 576, (576, 192, 192), torch.bfloat16, rank=16).each()
    before, first = torch.get_num_threads(), lora(*given_)
    try:
        torch.set_num_threads(threads)
        assert all(torch.equal(lora(*given_), first) for _ in range(3))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [(33,), (64, 16, 16), (300, 7)], ids=str)
@pytest.mark.parametrize("rank", [3, 16, 17])
def test_nothing_is_read_beyond_its_end(rows: tuple[int, ...], rank: int) -> None:
    given_ = operands(3, 45, rows, torch.bfloat16, rank=rank)
    names = ("x", "a", "b", "scales")
    ended = {name: at_the_end(getattr(given_, name)) for name in names}
    slots = at_the_end(given_.slots[:3].clone())
    call = registry.select("lora", device=torch.device("cpu"), dtype=torch.bfloat16, provider="cpu").call
    check(call(*given_.each(y=making_ended(given_.y), slots=slots, **ended)), given_)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_opcheck(dtype: torch.dtype, num_tokens: int) -> None:
    torch.library.opcheck(torch.ops.lamina.lora.default, operands(num_tokens, 8, (4, 2), dtype).each())


def test_what_does_not_fit_is_refused() -> None:
    given_ = operands(3, 8, (4, 2), torch.float32)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"x": given_.x[:2]}, "wanted \\[T, out\\]"),
        ({"rows": (4, 3)}, "wanted the parts of 6 outputs"),
        ({"rows": (6, 0)}, "wanted the parts of 6 outputs"),
        ({"b": given_.b[:, :5].contiguous()}, "b \\[3, 5, 4\\]"),
        ({"slots": given_.slots[:2]}, "wanted \\[3\\] or longer"),
        ({"slots": given_.slots.long()}, "slots is torch.int64"),
        ({"a": given_.a.double()}, "a torch.float64"),
        ({"a": given_.a.transpose(1, 2).contiguous().transpose(1, 2)}, "contiguous"),
        ({"slots": torch.tensor([0, 3, 0], dtype=torch.int32)}, "slots\\[1\\] is 3; wanted less than 3"),
    ]
    for changed, message in wrong:
        with pytest.raises(ShapeError, match=message):
            lora(*given_.each(**changed))
