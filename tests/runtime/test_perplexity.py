"""Perplexity of a text against transformers' on the same windows."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lamina.common.errors import LoadError
from lamina.runtime.perplexity import perplexity_of, perplexity_of_file

TEXT = "the hello of the world " * 40


def test_perplexity_is_that_of_transformers(tiny_text_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    told: list[tuple[str, float, str]] = []
    found = perplexity_of_file(
        tiny_text_folder, text, device="cpu", dtype="float32", progress=lambda *each: told.append(each)
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_text_folder)
    ids = tokenizer(TEXT)["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_text_folder, dtype=torch.float32).eval()
    step = 254  # of a context of 256, less BOS and the token that would be answered
    windows = [[ids[0], *ids[start : start + step]] for start in range(1, len(ids), step)]
    logprobs = [one for window in windows for one in by_transformers(model, window, len(tokenizer))]
    assert found.num_tokens == len(logprobs) == len(ids) - 1
    assert found.value == pytest.approx(math.exp(-sum(logprobs) / len(logprobs)), rel=1e-4)
    assert [fraction for stage, fraction, _ in told if stage == "perplexity"][-1] == 1.0


def by_transformers(model: Any, ids: list[int], num_tokens: int) -> list[float]:
    """Among the tokens that there are: a text cannot have the ids beyond those, which pad the vocabulary."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, :-1, :num_tokens]
    wanted: list[float] = logits.log_softmax(dim=-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return wanted


def test_what_cannot_be_measured_is_refused_by_name(
    tiny_folder: Path, tiny_text_folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    with pytest.raises(LoadError, match="text cannot be read"):
        perplexity_of_file(tiny_text_folder, text)
    text.write_text("h")
    with pytest.raises(LoadError, match="the text is 1 tokens"):
        perplexity_of_file(tiny_text_folder, text, device="cpu")
    with pytest.raises(LoadError, match="has no tokenizer"):
        perplexity_of_file(tiny_folder, text, device="cpu")


def test_beyond_all_numbers_it_is_infinite() -> None:
    assert perplexity_of([-1e6, -1e6]) == math.inf
    assert perplexity_of([-math.log(3.0)] * 5) == pytest.approx(3.0)
