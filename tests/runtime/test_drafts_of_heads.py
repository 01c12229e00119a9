"""What a head drafts in serving: what the published algorithm drafts, by transformers' own layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.heads import RandomHead
from torch import Tensor

from lamina import Eagle, Runtime, SamplingParams
from lamina.runtime.worker.drafter import DraftInput
from lamina.runtime.worker.drafters.eagle import EagleDrafter

K, PROMPT = 3, [5, 9, 44, 201, 7, 80, 81, 12, 300, 17, 3]
SUMS = [0, 1]  # of the last layer transformers has the normed one alone
HEADS: dict[str, dict[str, Any]] = {
    "eagle-1": {"is_third": False},
    "eagle-3": {"is_third": True, "num_sums": 2},
    "eagle-3 of few ids": {"is_third": True, "num_sums": 2, "draft_vocab_size": 50},
    "eagle-3 with other norms": {
        "is_third": True,
        "num_sums": 2,
        "norm_before_residual": True,
        "norm_before_fc": True,
    },
    "eagle-3 with normed output": {"is_third": True, "num_sums": 2, "norm_output": True},
}


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """How many tokens were computed and what was drafted, step by step; of a single request."""
    found: list[tuple[int, list[int]]] = []
    propose = EagleDrafter.propose

    def watched(self: EagleDrafter, step: DraftInput, draft_ids: Tensor) -> None:
        propose(self, step, draft_ids)
        if step.num_drafts and bool(step.is_sampling[0]) and step.request_ids:
            found.append((int(step.num_computed[0]), draft_ids[0, : step.num_drafts].tolist()))

    monkeypatch.setattr(EagleDrafter, "propose", watched)
    return found


def drafts_of(head: RandomHead, target: Any, tokens: list[int]) -> list[int]:
    """What the published algorithm drafts after these tokens, the last of which is not computed yet."""
    with torch.no_grad():
        out = target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        given = torch.cat([out[layer][0] for layer in SUMS], -1) if head.is_third else out[-1][0]
        states, ids, drafts = head.combined(given), tokens[1:], []
        for _ in range(K):
            last = head.states(torch.tensor(ids), states)[-1:]
            scores = head.logits(last) if head.is_third else target.lm_head(last)
            best = int(scores.argmax())
            drafts.append(int(head.target_ids[best]) if head.is_third else best)
            states, ids = torch.cat((states, last)), [*ids, drafts[-1]]
    return drafts


@pytest.mark.parametrize("kind", HEADS)
def test_drafts_are_those_of_the_published_algorithm(
    kind: str,
    tiny_folder: Path,
    tiny_reference: Callable[[Path], Any],
    tmp_path: Path,
    proposals: list[tuple[int, list[int]]],
) -> None:
    changes = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": SUMS}}
    head = RandomHead(changes=changes if HEADS[kind]["is_third"] else {}, **HEADS[kind])
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with Runtime.from_pretrained(
        tiny_folder,
        compile=False,
        dtype="float32",
        speculative=Eagle(model=head.save(tmp_path), k=K),
        num_kv_blocks=32,
    ) as runtime:
        answer = list(runtime.generate([PROMPT], params)[0].outputs[0].token_ids)
    tokens = [*PROMPT, *answer]
    assert len(proposals) >= 2
    for num_computed, drafts in proposals:
        if num_computed + 1 <= len(tokens) and num_computed + 1 + K <= len(PROMPT) + 11:
            expected = drafts_of(head, tiny_reference(tiny_folder), tokens[: num_computed + 1])
            assert drafts == expected, f"after {num_computed} tokens"
