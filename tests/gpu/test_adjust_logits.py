"""lamina::adjust_logits and lamina::keep_typical on a card against the formulas."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.custom_ops.registry import select

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
vocabularies = pytest.mark.parametrize("vocab", [40, 9000, 50_257, 128_256])


def call_of(op: str, dtype: torch.dtype, provider: str = "cuda") -> Callable[..., None]:
    return select(op, device=DEVICE, dtype=dtype, provider=provider).call


def arguments(vocab: int, dtype: torch.dtype, m: int, seed: int) -> dict[str, Any]:
    """Rows of every mixture: penalties, biases, exclusions, words that are met and words that are not."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    history = integers(0, min(vocab, 60), m, 700)
    lengths = integers(5, 700, m).long()
    slots = torch.randperm(m, generator=generator)
    words = torch.full((m, 3, 3), -1, dtype=torch.int32)
    for row, slot, length in zip(words, slots.tolist(), lengths.tolist(), strict=True):
        row[0, :2] = history[slot, length - 2 : length]
        row[1, 1] = history[slot, length - 1] + 1
        row[:, 2] = torch.randperm(vocab, generator=generator)[:3]
    penalties = [[1.0, 1.3, 0.7], [0.0, 0.5, -1.0], [0.0, -0.5, 1.0]]
    drawn = integers(0, 3, 3, m).long()
    given = {
        "logits": (torch.randn(m + 3, vocab, generator=generator) * 3).to(dtype),
        "rows": torch.randperm(m + 3, generator=generator)[:m],
        "history": history,
        "slots": slots,
        "lengths": lengths,
        "num_prompt": (lengths * torch.rand(m, generator=generator)).int(),
        "penalties": torch.tensor(penalties).gather(1, drawn),
        "bias_ids": torch.randperm(vocab, generator=generator)[:5].int().repeat(m, 1),
        "biases": torch.randn(m, 5, generator=generator),
        "allowed": integers(-(2**31), 2**31 - 1, m, -(-(vocab - 2) // 32)),
        "bad_words": words,
        "banned": integers(-1, vocab + 2, m, 3),
    }
    return {name: tensor.to(DEVICE) for name, tensor in given.items()} | {"num_valid_ids": vocab - 2}


@dtypes
@vocabularies
def test_adjusted_logits_have_the_formulas_bits(dtype: torch.dtype, vocab: int) -> None:
    for m, seed in [(1, 0), (7, 1), (64, 2)]:
        given = arguments(vocab, dtype, m, seed)
        if seed == 1:
            given["allowed"] = given["allowed"][:, :0].contiguous()
            given["bias_ids"], given["biases"] = given["bias_ids"][:, :0], given["biases"][:, :0].contiguous()
            given["bias_ids"] = given["bias_ids"].contiguous()
        outs = [torch.full((m, vocab + 6), torch.nan, device=DEVICE) for _ in range(2)]
        for provider, out in zip(("cuda", "reference"), outs, strict=True):
            call_of("adjust_logits", dtype, provider)(*given.values(), out)
        assert torch.equal(outs[0].view(torch.int32), outs[1].view(torch.int32))


@vocabularies
def test_what_is_typical_is_what_the_formula_keeps(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    num_different = 0
    for scale in (0.5, 3.0, 8.0):
        logits = (torch.randn(32, vocab, generator=generator) * scale).to(DEVICE)
        logits[1, : vocab // 3] = -torch.inf
        logits[2] = logits[2].round()
        logits[3, 2], logits[4, 3], logits[5] = torch.nan, torch.inf, -torch.inf
        temperature = torch.linspace(0, 2, 32, device=DEVICE)
        typical_p = torch.tensor([0.1, 0.5, 0.9, 0.99, 1.0, 0.3, 0.7, 0.2] * 4, device=DEVICE)
        outs = [logits.clone(), logits.clone()]
        for provider, out in zip(("cuda", "reference"), outs, strict=True):
            call_of("keep_typical", torch.float32, provider)(out, temperature, typical_p)
        different = (outs[0].view(torch.int32) != outs[1].view(torch.int32)).sum(dim=1)
        assert int(different.max()) <= 2  # sums in another order may end at a neighbour
        num_different += int((different > 0).sum())
    assert num_different <= 5


def test_both_are_recorded_and_replayed() -> None:
    given = arguments(50_257, torch.bfloat16, 16, 3)
    out = torch.empty(16, 50_264, device=DEVICE)
    columns = torch.full((16,), 0.8, device=DEVICE), torch.full((16,), 0.5, device=DEVICE)
    adjust, typical = call_of("adjust_logits", torch.bfloat16), call_of("keep_typical", torch.float32)

    def run() -> None:
        adjust(*given.values(), out)
        typical(out, *columns)

    run()
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))
