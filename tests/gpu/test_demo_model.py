"""The demo model on a GPU, against transformers on the same GPU."""

from pathlib import Path

import pytest
import torch

from lamina import Runtime, SamplingParams
from lamina.common.store import Store
from lamina.models.checkpoints.source import resolve_source

pytestmark = [pytest.mark.gpu, pytest.mark.demo, pytest.mark.timeout(600)]

PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "La vie est belle parce que",
    "The mitochondria is the powerhouse of the cell. " * 12,
]
NUM_TOKENS = 48
NEAR_TIE = 1e-4


def test_float32_gives_the_tokens_of_transformers(demo_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = resolve_source(demo_model, store=Store())
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to("cuda")
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    with Runtime.from_pretrained(folder, dtype="float32", device="cuda", max_model_len=1024) as runtime:
        outputs = runtime.generate(PROMPTS, params)
        assert runtime.stats()["resolved"]["attention"] == "cuda"
    for output in outputs:
        ids = list(output.prompt_token_ids)
        oracle = reference.generate(
            torch.tensor([ids], device="cuda"),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
        )
        wanted, got = oracle.sequences[0, len(ids) :].tolist(), output.outputs[0].token_ids
        for place, (token, right) in enumerate(zip(got, wanted, strict=False)):
            if token != right:
                best = oracle.logits[place][0].topk(2).values
                assert float(best[0] - best[1]) < NEAR_TIE, f"{output.prompt!r:.40} at token {place}"
                break


def test_bfloat16_answers_a_question(demo_model: Path) -> None:
    with Runtime.from_pretrained(demo_model, device="cuda", max_model_len=1024) as runtime:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        assert "Paris" in runtime.chat(question, SamplingParams(temperature=0, max_tokens=32)).text
        assert runtime.stats()["resolved"]["dtype"] == "bfloat16"
