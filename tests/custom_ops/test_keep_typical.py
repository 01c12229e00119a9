"""lamina::keep_typical: what transformers keeps, by every provider, and rows that it leaves alone."""

import pytest
import torch
from torch import Tensor

from lamina.common.errors import ShapeError
from lamina.custom_ops import keep_typical
from lamina.custom_ops._shared.registry import select

ON_CPU = pytest.mark.parametrize("provider", ["numpy", "reference"])


def kept(provider: str, logits: Tensor, temperature: float, typical_p: float) -> Tensor:
    out = logits.clone()
    columns = (torch.full((len(out),), value) for value in (temperature, typical_p))
    select("keep_typical", device=torch.device("cpu"), dtype=out.dtype, provider=provider).call(out, *columns)
    assert ((out == logits) | (out == -torch.inf)).all(), "what is kept stays as it is"
    return out > -torch.inf


def logits(num_rows: int, vocab: int, scale: float = 3.0) -> Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab)) * scale


@ON_CPU
@pytest.mark.parametrize("vocab", [50, 1000, 9000])
def test_what_transformers_keeps(provider: str, vocab: int) -> None:
    from transformers.generation.logits_process import TypicalLogitsWarper

    values = logits(4, vocab)
    values[1, : vocab // 3] = -torch.inf
    values[2] = 0.0
    for temperature in (0.5, 1.0, 1.7):
        for typical_p in (0.05, 0.2, 0.5, 0.9, 0.99):
            warped = TypicalLogitsWarper(mass=typical_p)(None, values.double() / temperature)
            assert torch.equal(kept(provider, values, temperature, typical_p), warped > -torch.inf)


@ON_CPU
def test_the_likeliest_token_goes_where_it_is_not_typical(provider: str) -> None:
    values = torch.cat([torch.tensor([[2.0]]), torch.zeros(1, 99)], dim=1)  # 7% for one, less than 1% each
    assert kept(provider, values, 1.0, 0.9)[0].tolist() == [False, *[True] * 99]
    assert kept(provider, values, 1.0, 0.95)[0].all()


@ON_CPU
def test_greedy_rows_rows_without_it_and_broken_rows_are_left_alone(provider: str) -> None:
    values = logits(6, 300)
    values[2, 5], values[3, 5], values[4] = torch.nan, torch.inf, -torch.inf
    out = values.clone()
    temperature, typical_p = torch.tensor([0.0, *[1.0] * 5]), torch.tensor([0.3, 1.0, 0.3, 0.3, 0.3, 0.3])
    call = select("keep_typical", device=torch.device("cpu"), dtype=out.dtype, provider=provider).call
    call(out, temperature, typical_p)
    assert torch.equal(out[:5].view(torch.int32), values[:5].view(torch.int32))
    assert not torch.equal(out[5], values[5])


def test_arguments_that_do_not_fit_are_named() -> None:
    ones = torch.ones(2)
    for given, message in [
        ((torch.zeros(2, 5).half(), ones, ones), "logits is"),
        ((torch.zeros(5, 2).T, ones, ones), r"strides \[1, 2\]"),
        ((torch.zeros(2, 5), torch.ones(3), ones), r"temperature is \[3\]"),
        ((torch.zeros(2, 5), ones, ones.double()), r"typical_p is \[2\] torch.float64"),
    ]:
        with pytest.raises(ShapeError, match=message):
            keep_typical(*given)


def test_opcheck() -> None:
    arguments = (logits(2, 30), torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
    torch.library.opcheck(torch.ops.lamina.keep_typical.default, arguments)
