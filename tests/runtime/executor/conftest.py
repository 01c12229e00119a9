"""A worker whose model is a table: the logits of a token depend on it and on its position alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lamina.runtime.worker.attention import AttentionBackend, PagedAttention
from lamina.runtime.worker.input_batch import InputBatch
from lamina.runtime.worker.model_runner import ModelRunner

from ..paged_model import VOCAB

SEQS, TOKENS, BLOCKS, BLOCK_SIZE = 4, 12, 40, 4


def no_attention() -> PagedAttention:
    """For a model without layers."""
    calls = [name for name in AttentionBackend.__dataclass_fields__ if name not in ("name", "reason")]
    return PagedAttention(
        AttentionBackend(name="none", reason="", **dict.fromkeys(calls, lambda *args: None)), [], []
    )


@pytest.fixture(scope="session")
def make_runner() -> Callable[..., ModelRunner]:
    """make_runner(**parts) -> a model runner of VOCAB tokens, the same for the same parts."""
    generator = torch.Generator().manual_seed(0)
    embedding, head = torch.randn(VOCAB, 8, generator=generator), torch.randn(8, VOCAB, generator=generator)

    def forward(token_ids: Tensor, positions: Tensor, attend: PagedAttention) -> Tensor:
        return embedding[token_ids] + positions.unsqueeze(1).sin()

    def make(**parts: object) -> ModelRunner:
        input_batch = InputBatch(
            max_num_seqs=SEQS,
            max_num_tokens=TOKENS,
            max_blocks_per_seq=BLOCKS,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB,
            device=torch.device("cpu"),
        )
        known = {
            "forward": forward,
            "logits": lambda hidden: hidden @ head,
            "attention": no_attention(),
            "input_batch": input_batch,
            "num_valid_ids": VOCAB,
        }
        return ModelRunner(**known | parts)  # type: ignore[arg-type]

    return make
