"""lamina::adjust_logits and lamina::keep_typical on a GPU against the formulas."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.sample.reference import CHUNK
from lamina.custom_ops.sample.workspace import workspace

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

    n = m + 3
    history, rows = integers(0, min(vocab, 60), m, 700), torch.randperm(n, generator=generator)[:m]
    positions, slots = integers(5, 700, n).long(), torch.randperm(m, generator=generator)
    token_ids, last_tokens = (
        integers(0, min(vocab, 60), 2 * n),
        torch.randperm(2 * n, generator=generator)[:n].int(),
    )
    lengths, newest = positions[rows], token_ids[last_tokens[rows].long()]
    words = torch.full((m, 3, 3), -1, dtype=torch.int32)
    for word, slot, length, token in zip(words, slots.tolist(), lengths.tolist(), newest, strict=True):
        word[0, :2] = torch.stack((history[slot, length - 2], token))  # met
        word[1, 1] = token + 1  # not met
        word[:, 2] = torch.randperm(vocab, generator=generator)[:3]
    penalties = [[1.0, 1.3, 0.7], [0.0, 0.5, -1.0], [0.0, -0.5, 1.0]]
    drawn = integers(0, 3, 3, m).long()
    given = {
        "logits": (torch.randn(n, vocab, generator=generator) * 3).to(dtype),
        "rows": rows,
        "history": history,
        "slots": slots,
        "positions": positions,
        "token_ids": token_ids,
        "last_tokens": last_tokens,
        "num_prompt": (lengths * torch.rand(m, generator=generator)).int(),
        "penalties": torch.tensor(penalties).gather(1, drawn),
        "bias_ids": torch.randperm(vocab, generator=generator)[:5].int().repeat(m, 1),
        "biases": torch.randn(m, 5, generator=generator),
        "allowed": integers(-(2**31), 2**31 - 1, m, -(-(vocab - 2) // 32)),
        "bad_words": words,
        "banned": integers(-1, vocab + 2, n, 3),
        "temperature": torch.linspace(0, 2, m),
    }
    return {name: tensor.to(DEVICE) for name, tensor in given.items()} | {"num_valid_ids": vocab - 2}


def outputs(given: dict[str, Any], width: int) -> dict[str, Tensor]:
    """Somewhere to put the scores and chunks of these arguments."""
    m, num_chunks = len(given["rows"]), -(-given["num_valid_ids"] // CHUNK)
    out = torch.full((m, width), torch.nan, device=DEVICE)
    return {"out": out, "chunks": torch.full((m, num_chunks, 2), torch.nan, device=DEVICE)}


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@dtypes
@vocabularies
def test_adjusted_logits_have_the_formulas_bits(dtype: torch.dtype, vocab: int) -> None:
    for m, seed in [(1, 0), (7, 1), (64, 2)]:
        given = arguments(vocab, dtype, m, seed)
        if seed == 1:
            given["allowed"] = given["allowed"][:, :0].contiguous()
            given["bias_ids"], given["biases"] = given["bias_ids"][:, :0], given["biases"][:, :0].contiguous()
            given["bias_ids"] = given["bias_ids"].contiguous()
        results = []
        for provider in ("cuda", "reference"):
            own = given | {"history": given["history"].clone()} | outputs(given, vocab + 6 - m % 2)
            call_of("adjust_logits", dtype, provider)(*own.values())
            results.append(own)
        ours, formula = results
        assert torch.equal(ours["history"], formula["history"])
        assert not torch.equal(ours["history"], given["history"])
        assert same_bits(ours["out"], formula["out"])
        assert same_bits(ours["chunks"][:, :, 0], formula["chunks"][:, :, 0])
        torch.testing.assert_close(ours["chunks"], formula["chunks"], rtol=1e-5, atol=1e-6)


@dtypes
@pytest.mark.parametrize("width", [0, 1])  # more than the vocabulary: in vectors, and not
def test_chunks_are_to_the_bit_what_sampling_finds(dtype: torch.dtype, width: int) -> None:
    given = arguments(128_256, dtype, 40, 5)
    own, num_valid_ids = given | outputs(given, 128_256 + width), given["num_valid_ids"]
    call_of("adjust_logits", dtype)(*own.values())
    num_rows, places = len(given["slots"]), given["rows"]
    columns = [torch.full((num_rows,), value, device=DEVICE) for value in (0, 0.9, 0.0)]
    settings = given["temperature"], columns[0].int(), *columns[1:], given["slots"]
    step = given["positions"], given["banned"], num_valid_ids
    tokens = [torch.full_like(given["last_tokens"], -1) for _ in range(3)]
    sample, formula = call_of("sample", torch.float32), call_of("sample", torch.float32, "reference")
    sample(own["out"], *settings, *step, tokens[0], places, own["chunks"])
    sample(own["out"], *settings, *step, tokens[1], places)
    found = workspace(own["out"].device, own["chunks"].numel())[: own["chunks"].numel()]
    assert same_bits(found, own["chunks"].view(-1))
    formula(own["out"], *settings, *step, tokens[2], places)
    assert torch.equal(tokens[0], tokens[1])
    assert int((tokens[0] != tokens[2]).sum()) <= 1  # odds are summed in another order


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


def test_both_are_captured_and_replayed() -> None:
    given = arguments(50_257, torch.bfloat16, 16, 3)
    own = given | outputs(given, 50_264)
    out = own["out"]
    columns = torch.full((16,), 0.8, device=DEVICE), torch.full((16,), 0.5, device=DEVICE)
    adjust, typical = call_of("adjust_logits", torch.bfloat16), call_of("keep_typical", torch.float32)

    def run() -> None:
        adjust(*own.values())
        typical(out, *columns)

    run()
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))
