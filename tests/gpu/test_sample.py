"""lamina::sample on a GPU, by each provider, against the formula."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lamina.common.errors import UnsupportedError
from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.sample import reference

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
POISON = -77
providers = pytest.mark.parametrize("provider", ["cuda", "triton"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


class Rows(NamedTuple):
    """The arguments of lamina::sample between the logits and the output."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor
    banned: Tensor
    num_valid_ids: int


def make_rows(
    num_rows: int,
    num_valid_ids: int,
    *,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    banned: Tensor | None = None,
    seed: int = 0,
) -> Rows:
    """Settings of rows that have a seed and a position each; a scalar holds for every row."""

    def column(value: Any, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(value, dtype=dtype, device=DEVICE).expand(num_rows).contiguous()

    return Rows(
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        torch.arange(num_rows, device=DEVICE) * 977 + seed,
        torch.arange(num_rows, device=DEVICE) * 31,
        torch.empty(num_rows, 0, dtype=torch.int32, device=DEVICE) if banned is None else banned,
        num_valid_ids,
    )


def mixed_rows(num_rows: int, num_valid_ids: int, seed: int) -> Rows:
    """Rows of every mixture of settings, greedy ones among them."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (num_rows,), generator=generator)]

    banned = torch.randint(-1, num_valid_ids, (num_rows, 3), generator=generator, dtype=torch.int32)
    return make_rows(
        num_rows,
        num_valid_ids,
        temperature=pick(0.0, 0.3, 1.0, 1.0, 2.5),
        top_k=pick(0, 0, 1, 7, 50, 400, 3000, 40_000, 10**6),
        top_p=pick(1, 1, 1e-6, 0.1, 0.5, 0.9, 0.999),
        min_p=pick(0, 0, 0, 0.01, 0.3, 1.0),
        banned=banned.to(DEVICE),
        seed=seed,
    )


def make_logits(num_rows: int, vocab: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return (torch.randn(num_rows, vocab, generator=generator, device=DEVICE) * scale).to(dtype)


def run(call: Callable[..., None], logits: Tensor, rows: Rows) -> Tensor:
    """What a provider writes over poison."""
    out = torch.full((len(logits),), POISON, dtype=torch.int32, device=DEVICE)
    call(logits, *rows, out)
    return out


def call_of(provider: str, dtype: torch.dtype) -> Callable[..., None]:
    return select("sample", device=DEVICE, dtype=dtype, provider=provider).call


def num_different(call: Callable[..., None], logits: Tensor, rows: Rows) -> int:
    """Rows whose token is not the formula's."""
    return int((run(call, logits, rows) != run(reference.sample, logits, rows)).sum())


@providers
@dtypes
@pytest.mark.parametrize("vocab", [49_152, 128_256, 50_257, 300, 7])
def test_mixed_batches_get_the_formulas_tokens(provider: str, dtype: torch.dtype, vocab: int) -> None:
    call = call_of(provider, dtype)
    for num_rows, scale in [(1, 1.0), (1, 4.0), (7, 0.01), (7, 8.0), (64, 1.0), (64, 4.0)]:
        for seed in range(3):
            logits = make_logits(num_rows, vocab, dtype, seed, scale)
            rows = mixed_rows(num_rows, vocab - seed % 2, seed)
            assert num_different(call, logits, rows) == 0


@providers
def test_a_batch_of_256_rows_of_128256_logits(provider: str) -> None:
    call, different = call_of(provider, torch.bfloat16), 0
    for seed, scale in [(0, 1.0), (1, 4.0)]:
        logits = make_logits(256, 128_256, torch.bfloat16, seed, scale)
        different += num_different(call, logits, mixed_rows(256, 128_256, seed))
        assert num_different(call, logits, make_rows(256, 128_256, temperature=0.0)) == 0
    assert different <= 1  # odds are summed in another order


@providers
@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 3},
        {"top_k": 60},
        {"top_k": 5000},
        {"top_p": 0.02},
        {"top_p": 0.7},
        {"top_k": 100, "top_p": 0.8, "min_p": 0.05},
        {"min_p": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_thousands_of_draws_from_one_row(provider: str, settings: dict[str, Any], scale: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = make_logits(1, 20_000, dtype, 1, scale).expand(2048, -1)
        rows = make_rows(2048, 20_000, **settings)
        assert num_different(call_of(provider, dtype), logits, rows) <= 1


@providers
@dtypes
def test_broken_and_extreme_rows(provider: str, dtype: torch.dtype) -> None:
    logits = make_logits(12, 3000, dtype, 3).clamp_(-3, 3)
    logits[0, [700, 20]] = torch.nan
    logits[1, [900, 40, 41]] = torch.inf
    logits[2] = -torch.inf
    logits[3, 5:] = -torch.inf
    logits[4] = 0.0
    logits[5, 1000:] = -0.0
    logits[6] = torch.finfo(dtype).min
    logits[7, 33] = torch.finfo(dtype).max
    logits[8] = torch.nan
    logits[9, :2999] = -torch.inf
    call = call_of(provider, dtype)
    for temperature in (0.0, 1.0, 1e-38, 1e-45, 3e38):
        for filters in ({}, {"top_k": 10}, {"top_p": 0.9}, {"min_p": 0.2}, {"top_k": 40, "top_p": 0.5}):
            rows = make_rows(12, 3000, temperature=temperature, **filters)
            assert run(call, logits, rows).tolist() == run(reference.sample, logits, rows).tolist()


@providers
@dtypes
def test_a_ban_hides_no_broken_logit(provider: str, dtype: torch.dtype) -> None:
    logits = make_logits(6, 3000, dtype, 4)
    logits[0, 7], logits[1, 7], logits[2, 7], logits[3] = torch.nan, torch.inf, -torch.inf, -torch.inf
    logits[3, 7] = 1.0  # of all that may be chosen, none is above -inf
    logits[4, 2999] = torch.nan
    banned = torch.full((6, 2), 7, dtype=torch.int32, device=DEVICE)
    for temperature in (0.0, 1.0):
        rows = make_rows(6, 3000, temperature=temperature, top_p=0.9, banned=banned)
        found = run(call_of(provider, dtype), logits, rows).tolist()
        assert [token == reference.BROKEN for token in found] == [True, True, False, True, True, False]


@providers
@pytest.mark.parametrize("shares", [[3, 1, 1, 5], [4, 4, 2], [1] * 5, [7, 2, 1, 6, 4]], ids=str)
def test_a_share_that_is_reached_exactly_is_enough(provider: str, shares: list[int]) -> None:
    logits = torch.tensor(shares, dtype=torch.float64, device=DEVICE).log().float().expand(4096, -1)
    order = sorted(range(len(shares)), key=lambda id_: (-shares[id_], id_))
    call = call_of(provider, torch.float32)
    for count in range(1, len(shares)):
        edge = sum(shares[id_] for id_ in order[:count]) / sum(shares)
        for top_p, kept in ((edge, order[:count]), (edge + 1e-4, order[: count + 1])):
            rows = make_rows(4096, len(shares), top_p=top_p)
            assert set(run(call, logits.contiguous(), rows).tolist()) == set(kept)
        least = shares[order[count]] / max(shares)
        rows = make_rows(4096, len(shares), min_p=least)
        kept = [id_ for id_ in order if shares[id_] >= shares[order[count]]]
        assert set(run(call, logits.contiguous(), rows).tolist()) == set(kept)


@providers
def test_equal_logits_are_kept_by_id(provider: str) -> None:
    logits = torch.zeros(4096, 70_000, dtype=torch.bfloat16, device=DEVICE)[:, :66_001]
    for top_k in (1, 3000, 66_000):
        rows = make_rows(4096, 66_001, top_k=top_k)
        drawn = run(call_of(provider, torch.bfloat16), logits, rows)
        assert int(drawn.max()) < top_k
        assert int(drawn.max()) > 0.98 * top_k - 2


@providers
@pytest.mark.parametrize("vocab", [1977, 20_000, 50_257, 66_001, 128_256])
def test_a_share_of_equal_logits_is_kept_to_the_token(provider: str, vocab: int) -> None:
    logits = torch.zeros(512, vocab, dtype=torch.bfloat16, device=DEVICE)
    for top_p in (0.02, 0.3, 0.5, 0.7, 0.9, 0.95, 0.999):
        share = torch.tensor(top_p).double().item() * vocab
        last = math.ceil(share) - 1
        rows = make_rows(512, vocab, top_p=top_p)
        drawn, expected = (
            run(call, logits, rows) for call in (call_of(provider, logits.dtype), reference.sample)
        )
        assert torch.equal(drawn, expected)
        assert int(drawn.max()) <= last


@providers
def test_many_bans_and_bans_of_what_is_no_id(provider: str) -> None:
    logits = make_logits(5, 1000, torch.bfloat16, 2)
    banned = torch.full((5, 70), -1, dtype=torch.int32, device=DEVICE)
    banned[:, 3:60] = logits.topk(57).indices.int()
    banned[:, 64:] = torch.tensor([1000, 5000, -5, 999, 0, 2**31 - 1])
    for temperature in (0.0, 1.0):
        rows = make_rows(5, 1000, temperature=temperature, top_k=20, banned=banned)
        chosen = run(call_of(provider, torch.bfloat16), logits, rows)
        assert torch.equal(chosen, run(reference.sample, logits, rows))
        assert not (chosen.unsqueeze(-1) == banned).any()


@providers
def test_a_row_draws_the_same_alone_and_in_a_batch(provider: str) -> None:
    call = call_of(provider, torch.bfloat16)
    logits, rows = make_logits(64, 128_256, torch.bfloat16, 5), mixed_rows(64, 128_256, 5)
    together = run(call, logits, rows)
    for i in range(0, 64, 5):
        alone = Rows(*(column[i : i + 1] for column in rows[:-1]), rows.num_valid_ids)
        assert run(call, logits[i : i + 1], alone).tolist() == [int(together[i])]


@providers
def test_rows_that_begin_anywhere_in_wider_rows(provider: str) -> None:
    wide = make_logits(9, 3 * 4096, torch.bfloat16, 6)
    for start, vocab in [(0, 4096), (8, 4096), (1, 4096), (8, 4093)]:
        logits = wide[:, start : start + vocab]
        assert num_different(call_of(provider, torch.bfloat16), logits, mixed_rows(9, vocab, 6)) == 0


@providers
def test_rows_may_have_their_indices_among_others(provider: str) -> None:
    call, generator = call_of(provider, torch.bfloat16), torch.Generator().manual_seed(8)
    logits, rows = make_logits(150, 5000, torch.bfloat16, 8), mixed_rows(150, 5000, 8)
    row_indices = torch.randperm(200, generator=generator)[:150].to(DEVICE)
    positions = torch.zeros(200, dtype=torch.int64, device=DEVICE)
    banned = torch.zeros(200, 3, dtype=torch.int32, device=DEVICE)
    positions[row_indices], banned[row_indices] = rows.positions, rows.banned
    out = torch.full((200,), POISON, dtype=torch.int32, device=DEVICE)
    call(logits, *rows._replace(positions=positions, banned=banned), out, row_indices)
    assert torch.equal(out[row_indices], run(call, logits, rows))
    assert int((out == POISON).sum()) == 50


@providers
def test_one_cuda_graph_serves_every_mixture(provider: str) -> None:
    call = call_of(provider, torch.bfloat16)
    logits, rows = make_logits(32, 128_256, torch.bfloat16, 7), mixed_rows(32, 128_256, 7)
    out = run(call, logits, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(logits, *rows, out)
    for seed in range(4):
        logits.copy_(make_logits(32, 128_256, torch.bfloat16, 10 + seed, 1 + seed))
        for old, new in zip(rows[:-1], mixed_rows(32, 128_256, seed)[:-1], strict=True):
            old.copy_(new)
        out.fill_(POISON)
        graph.replay()
        assert torch.equal(out, run(reference.sample, logits, rows))


def test_noise_has_the_same_bits_on_the_gpu_as_on_the_cpu() -> None:
    seeds = torch.arange(512) - 256
    keys = reference.row_keys(seeds, seeds.flip(0) * 3)
    counters = torch.arange(-4096, 4096, dtype=torch.int32)
    there = reference.exponential_noise(keys.to(DEVICE), counters.to(DEVICE)).cpu()
    assert torch.equal(there, reference.exponential_noise(keys, counters))


def test_too_many_ids_are_refused() -> None:
    logits = torch.empty(1, 600_000, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(UnsupportedError, match="num_valid_ids is 600000"):
        run(call_of("cuda", torch.bfloat16), logits, make_rows(1, 600_000))
