"""Drafts verified on a GPU: the same tokens as without, and drafts that every kernel finds alike."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lamina import CompileConfig, NGram, Runtime, SamplingParams, StructuredOutputs
from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.propose_ngram import reference
from lamina.runtime.startup import builder

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROMPTS = [[3 + (7 * row + 3 * column) % 40 for column in range(5 + 9 * row)] for row in range(7)]
SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cuda", "max_num_seqs": 8, "num_kv_blocks": 128}


@pytest.mark.parametrize("provider", ["cuda", "triton"])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_drafts_are_those_of_the_formula(provider: str, block_size: int) -> None:
    generator = torch.Generator().manual_seed(block_size)
    rows, max_blocks = 9, 4000 // block_size
    lots = torch.randint(0, 3, (rows * max_blocks + 1, block_size), generator=generator)
    tables = 1 + torch.randperm(rows * max_blocks, generator=generator).view(rows, max_blocks)
    ends = torch.tensor([0, 1, 2, 5, 31, 900, 1024, 2049, max_blocks * block_size - 1])
    newest = torch.randint(0, 3, (rows,), generator=generator)
    tokens, block_tables, num_computed, newest = (
        values.int().cuda() for values in (lots, tables, ends, newest)
    )
    call = select("propose_ngram", device=torch.device("cuda"), dtype=torch.int32, provider=provider).call
    for ngram in ((1, 1), (2, 8), (6, 32)):
        for k in (1, 3, 7):
            found, wanted = (torch.full((rows, k), -7, dtype=torch.int32, device="cuda") for _ in range(2))
            call(tokens, block_tables, num_computed, newest, *ngram, found)
            reference.propose_ngram(tokens, block_tables, num_computed, newest, *ngram, wanted)
            assert torch.equal(found, wanted), (ngram, k)


@pytest.fixture(scope="module")
def open_runtime(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Runtime]:
    cache = tmp_path_factory.mktemp("cache")

    def make(cuda_graphs: Any = "auto", **settings: Any) -> Runtime:
        compile_config = CompileConfig(cuda_graphs=cuda_graphs)
        return Runtime.from_pretrained(
            tiny_folder, cache_dir=cache, compile=compile_config, **SETTINGS | settings
        )

    return make


class Known:
    """Drafts out of known answers, by where a token stands and which it is: captured as any step is."""

    wants_aux: tuple[int, ...] = ()

    def __init__(self, outputs: list[Any], k: int) -> None:
        table = torch.zeros(256, 320, k, dtype=torch.int32)
        for output in outputs:
            whole = (*output.prompt_token_ids, *output.outputs[0].token_ids)
            for place in range(len(whole) - k):
                table[place, whole[place]] = torch.tensor(whole[place + 1 : place + 1 + k])
        self.table = table.cuda()

    def propose(self, step: Any, draft_ids: torch.Tensor) -> None:
        if step.num_drafts:
            places, tokens = step.num_computed.clamp(0, 255).long(), step.newest.clamp(0, 319).long()
            draft_ids.copy_(self.table[places, tokens])


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("cuda_graphs", ["auto", "off"])
def test_speculated_tokens_are_those_without(
    open_runtime: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch, cuda_graphs: str, k: int
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    drawn = [SamplingParams(temperature=0.4, seed=row, max_tokens=90, ignore_eos=True) for row in range(7)]
    with open_runtime() as plain:
        wanted = [plain.generate(PROMPTS, params) for params in (greedy, drawn)]
    drafter = Known(wanted[0], k)
    monkeypatch.setattr(builder, "new_drafter", lambda resolved: drafter)
    with open_runtime(cuda_graphs, speculative=NGram(k=k)) as runtime:
        found = [runtime.generate(PROMPTS, params) for params in (greedy, drawn)]
        counts = runtime.stats()["speculation"]
    assert 0 < counts["accepted_tokens"] < counts["draft_tokens"]
    for some, others in zip(found, wanted, strict=True):
        assert [a.outputs[0].token_ids for a in some] == [b.outputs[0].token_ids for b in others]


def test_ngrams_change_no_token(open_runtime: Callable[..., Runtime]) -> None:
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    with open_runtime() as plain:
        wanted = plain.generate(PROMPTS, params)
    with open_runtime(speculative=NGram(k=3, min_ngram=1)) as runtime:
        found = runtime.generate(PROMPTS, params)
        assert runtime.stats()["speculation"]["draft_tokens"] > 0
    assert [a.outputs[0].token_ids for a in found] == [b.outputs[0].token_ids for b in wanted]


@pytest.mark.parametrize("cuda_graphs", ["auto", "off"])
def test_forms_are_kept_to_at_every_draft(
    tiny_text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda_graphs: str
) -> None:
    pytest.importorskip("llguidance")
    forms = [
        StructuredOutputs(regex=regex) for regex in ("[a-z ]{40}", "[ab]{9}once upon a time, the end[cd]{9}")
    ]
    params = [
        SamplingParams(temperature=0.5 * row, seed=row, max_tokens=60, structured_outputs=form)
        for row, form in enumerate((*forms, None))
    ]
    settings: dict[str, Any] = SETTINGS | {
        "cache_dir": tmp_path,
        "compile": CompileConfig(cuda_graphs=cuda_graphs),
    }
    with Runtime.from_pretrained(tiny_text_folder, **settings) as plain:
        wanted = plain.generate(PROMPTS[:3], params)
    drafter = Known(wanted, 3)
    monkeypatch.setattr(builder, "new_drafter", lambda resolved: drafter)
    with Runtime.from_pretrained(tiny_text_folder, speculative=NGram(k=3), **settings) as runtime:
        found = [runtime.generate([prompt], [own])[0] for prompt, own in zip(PROMPTS, params, strict=False)]
        together = runtime.generate(PROMPTS[:3], params)
        counts = runtime.stats()["speculation"]
    assert counts["accepted_tokens"] > 0
    for answers in (found, together):
        assert [a.outputs[0].token_ids for a in answers] == [b.outputs[0].token_ids for b in wanted]


def test_steps_with_drafts_are_captured(
    open_runtime: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    with open_runtime() as plain:
        drafter = Known(plain.generate(PROMPTS[:1], params), 3)
    monkeypatch.setattr(builder, "new_drafter", lambda resolved: drafter)
    with open_runtime(speculative=NGram(k=3)) as runtime:
        runtime.generate(PROMPTS[:1], params)
        before = runtime.stats()["cuda_graphs"]
        runtime.generate(PROMPTS[:1], params)
        after = runtime.stats()["cuda_graphs"]
        assert after["eager_steps"] - before["eager_steps"] <= 1, "all but the prompt's own"
        assert after["replays"] - before["replays"] < 60
