"""lamina::all_reduce_add_rms_norm."""

import pytest
import torch
from torch import Tensor

from lamina.common.errors import ShapeError
from lamina.custom_ops import add_rms_norm, all_reduce, all_reduce_add_rms_norm
from lamina.custom_ops._shared import registry
from lamina.custom_ops.all_reduce.group import Group, MirrorGroup, group_of_thread

from ..ranks import as_threads

OP = "all_reduce_add_rms_norm"
PROVIDERS = [name for name in registry.providers(OP) if registry.runs_on(OP, name, "cpu")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def arguments(rank: int, dtype: torch.dtype, num_tokens: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """x of a rank, and what all ranks have alike."""
    own, alike = (torch.Generator().manual_seed(seed) for seed in (1 + rank, 0))
    x = torch.randn(num_tokens, 64, generator=own, dtype=torch.float64)
    residual, weight = (torch.randn(shape, generator=alike).double() for shape in ((num_tokens, 64), (64,)))
    return x.to(dtype), residual.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("unrounded", [False, True])
def test_it_has_the_bits_of_both_ops_on_every_rank(
    provider: str, dtype: torch.dtype, unrounded: bool
) -> None:
    def work(group: Group) -> tuple[Tensor, ...]:
        x, residual, weight = arguments(group.rank, dtype)
        device = torch.device("cpu")
        call = registry.select(OP, device=device, dtype=dtype, provider=provider).call
        found = call(x, residual, weight, 1e-5, 3, unrounded)
        wanted = add_rms_norm(all_reduce(x, 3), residual, weight, 1e-5, unrounded)
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
        return found

    first, *others = as_threads(3, work)
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_it_is_a_function_of_its_arguments(num_tokens: int) -> None:
    with group_of_thread(MirrorGroup(2)):
        given = (*arguments(0, torch.float32, num_tokens), 1e-5, 2)
        torch.library.opcheck(torch.ops.lamina.all_reduce_add_rms_norm.default, given)


def test_what_does_not_fit_is_refused() -> None:
    x, residual, weight = arguments(0, torch.float32)
    with pytest.raises(ShapeError, match="all_reduce_add_rms_norm: residual is"):
        all_reduce_add_rms_norm(x, residual[1:], weight, 1e-5, 1)
    with pytest.raises(ShapeError, match="all_reduce_add_rms_norm: weight is"):
        all_reduce_add_rms_norm(x, residual, weight[1:], 1e-5, 1)
