"""The demo model through the whole runtime, against transformers on the same weights."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lamina import RequestOutput, Runtime, SamplingParams
from lamina.common.store import Store
from lamina.models.checkpoints.source import resolve_source

pytestmark = [
    pytest.mark.demo,
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("build_once", "two_threads"),
]

NUM_TOKENS = 64
NEAR_TIE = 1e-4  # where the oracle's two best logits are closer, either may win
PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the boiling point of water?\nA:",
    "量子力学は",
    "La vie est belle parce que",
    "   leading spaces and\ttabs",
    "SELECT name, COUNT(*) FROM",
    "The mitochondria is the powerhouse of the cell. " * 12,
    "x",
    "<html><body><h1>Welcome</h1>",
    "🙂 means happy, 😢 means",
    "In 1969, Neil Armstrong",
    "To bake bread you need flour, water, salt and yeast. First,",
    '{"name": "Alice", "age":',
    "Шла Саша по шоссе",
    "Roses are red,\nViolets are blue,\n",
    "The quick brown fox jumps over the lazy dog. The lazy dog",
]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)


@dataclass(frozen=True)
class Answer:
    """The oracle's tokens, and at each of them how far its best logit led the second."""

    tokens: list[int]
    leads: list[float]


@pytest.fixture(scope="module")
def folder(demo_model: Path) -> Path:
    return resolve_source(demo_model, store=Store())


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def encode(folder: Path) -> Callable[[str], list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda text: list(tokenizer(text)["input_ids"])


@pytest.fixture(scope="module")
def runtime(folder: Path) -> Iterator[Runtime]:
    with Runtime.from_pretrained(folder, dtype="float32", max_model_len=1024) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def together(runtime: Runtime) -> list[RequestOutput]:
    return runtime.generate(PROMPTS, GREEDY)


@pytest.fixture(scope="module")
def answers(
    reference: Any, together: list[RequestOutput], encode: Callable[[str], list[int]]
) -> list[Answer]:
    guesses = [list(output.outputs[0].token_ids) for output in together]
    return [_answer(reference, encode(prompt), guess) for prompt, guess in zip(PROMPTS, guesses, strict=True)]


def _answer(reference: Any, ids: list[int], guess: list[int]) -> Answer:
    """The oracle's own greedy answer, whatever is guessed: a pass takes the guess up to its first mistake."""
    stops = torch.tensor(reference.generation_config.eos_token_id).flatten().tolist()  # one or many
    tokens: list[int] = []
    leads: list[float] = []
    while len(tokens) < NUM_TOKENS and (not tokens or tokens[-1] not in stops):
        guess = tokens + guess[len(tokens) :]
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + guess])).logits[0, len(ids) + len(tokens) - 1 :]
        for row in logits[: NUM_TOKENS - len(tokens)]:
            best = row.topk(2)
            tokens.append(int(best.indices[0]))
            leads.append(float(best.values[0] - best.values[1]))
            if tokens != guess[: len(tokens)] or tokens[-1] in stops:
                break
    return Answer(tokens, leads)


def _check(prompt: str, got: Sequence[int], wanted: Answer) -> None:
    """Equal token for token, up to a place where the oracle itself could not decide."""
    for place, (token, right) in enumerate(zip(got, wanted.tokens, strict=False)):
        if token != right:
            lead = wanted.leads[place]
            print(f"{prompt!r:.40}: token {place} is {token}, the oracle's {right} leads by {lead:.2e}")
            assert lead < NEAR_TIE, f"{prompt!r:.40} leaves the oracle at token {place}, lead {lead:.2e}"
            return
    assert len(got) == len(wanted.tokens), f"{prompt!r:.40}: {len(got)} tokens for {len(wanted.tokens)}"


@pytest.mark.long
def test_each_prompt_alone_gives_the_tokens_of_transformers(runtime: Runtime, answers: list[Answer]) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        _check(prompt, runtime.generate(prompt, GREEDY)[0].outputs[0].token_ids, answer)


def test_a_batch_of_all_prompts_gives_the_tokens_of_transformers(
    together: list[RequestOutput], answers: list[Answer]
) -> None:
    for output, answer in zip(together, answers, strict=True):
        _check(output.prompt or "", output.outputs[0].token_ids, answer)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_number_of_threads_gives_the_same_tokens_and_compiles_nothing(
    folder: Path, dtype: str
) -> None:
    found = []
    for number in (1, 2, 3, 16):
        torch.set_num_threads(number)
        with Runtime.from_pretrained(
            folder, dtype=dtype, max_model_len=1024, require_warm=number > 1
        ) as runtime:
            outputs = runtime.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found == [found[0]] * len(found)


def test_a_stream_gives_the_tokens_and_the_text_of_the_whole_answer(
    runtime: Runtime, together: list[RequestOutput], answers: list[Answer]
) -> None:
    """Of a text in English, and of one with several tokens to a character."""
    for place in (0, 6):
        output, answer = together[place], answers[place]
        deltas = list(runtime.stream(output.prompt or "", GREEDY))
        _check(output.prompt or "", [token for delta in deltas for token in delta.token_ids], answer)
        assert "".join(delta.text for delta in deltas) == output.text


@pytest.mark.long
@pytest.mark.parametrize("block_size, prefill_chunk", [(4, 7), (4, None), (16, 7)])
def test_small_blocks_and_chunked_prompts_change_no_token(
    folder: Path, answers: list[Answer], block_size: int, prefill_chunk: int | None
) -> None:
    settings = {"block_size": block_size, "prefill_chunk": prefill_chunk, "max_model_len": 1024}
    with Runtime.from_pretrained(folder, dtype="float32", **settings) as runtime:
        for output, answer in zip(runtime.generate(PROMPTS, GREEDY), answers, strict=True):
            _check(output.prompt or "", output.outputs[0].token_ids, answer)


@pytest.mark.long
def test_a_small_cache_serves_many_requests_and_gives_every_block_back(
    folder: Path, answers: list[Answer]
) -> None:
    """32 requests where the cache holds about 8 at their full length."""
    short = [index for index, prompt in enumerate(PROMPTS) if len(prompt) < 80]
    chosen = [short[number % len(short)] for number in range(32)]
    settings = {"block_size": 16, "num_kv_blocks": 8 * 6 + 1, "max_model_len": 1024}
    with Runtime.from_pretrained(folder, dtype="float32", **settings) as runtime:
        outputs = runtime.generate([PROMPTS[index] for index in chosen], GREEDY)
        for index, output in zip(chosen, outputs, strict=True):
            _check(PROMPTS[index], output.outputs[0].token_ids, answers[index])
        stats = runtime.stats()
        assert stats["blocks"]["free"] + stats["blocks"]["cached"] == stats["blocks"]["total"] == 48
        assert stats["requests"] == {"waiting": 0, "running": 0, "finished": 32}


@pytest.mark.long
def test_prompts_that_begin_alike_get_their_own_tokens_from_shared_blocks(
    folder: Path, encode: Callable[[str], list[int]], answers: list[Answer]
) -> None:
    """Each prompt, bare and with some of its answer: what follows is the rest of it, alone and batched."""
    whole = [place for place, answer in enumerate(answers) if len(answer.tokens) == NUM_TOKENS]
    chosen = [
        (place, own, Answer(answers[place].tokens[own:], answers[place].leads[own:]))
        for place in whole[:3]
        for own in (0, 9, 33)
    ]
    prompts = [encode(PROMPTS[place]) + answers[place].tokens[:own] for place, own, _ in chosen]
    params = [SamplingParams(temperature=0, max_tokens=NUM_TOKENS - own) for _, own, _ in chosen]
    settings = {"block_size": 4, "num_kv_blocks": 20 * 3 + 1, "max_model_len": 256, "swap_bytes": 1 << 26}
    with Runtime.from_pretrained(folder, dtype="float32", **settings) as runtime:
        together = runtime.generate(prompts, params)
        alone = [runtime.generate([ids], own)[0] for ids, own in zip(prompts[:3], params, strict=False)]
        stats = runtime.stats()
    for (place, _, answer), output in zip(chosen + chosen[:3], together + alone, strict=True):
        _check(PROMPTS[place], output.outputs[0].token_ids, answer)
    assert sum(output.num_cached_tokens > 0 for output in together) > 3
    assert all(output.num_cached_tokens > 0 for output in alone[1:3]), "found from before"
    assert stats["preemptions"] > 0
    assert stats["swap"]["in"] > 0


@pytest.mark.long
def test_bfloat16_errs_at_most_twice_as_much_as_transformers_in_bfloat16(
    folder: Path, reference: Any, encode: Callable[[str], list[int]]
) -> None:
    """Error of the last hidden states' logits against float32, summed over prompts."""
    from transformers import AutoModelForCausalLM

    narrow = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ours = theirs = 0.0
    with Runtime.from_pretrained(folder, dtype="bfloat16", max_model_len=1024) as runtime:
        for prompt in PROMPTS:
            ids = encode(prompt)
            with torch.inference_mode():
                exact = reference(torch.tensor([ids])).logits[0, -1]
                theirs += float((narrow(torch.tensor([ids])).logits[0, -1].float() - exact).square().mean())
            ours += float((_last_logits(runtime, ids).float() - exact).square().mean())
    print(f"root mean square error: ours {ours**0.5:.4f}, transformers' {theirs**0.5:.4f}")
    assert ours**0.5 <= 2 * theirs**0.5


def _last_logits(runtime: Runtime, ids: list[int]) -> torch.Tensor:
    """The logits that the runtime samples from."""
    caught: list[torch.Tensor] = []
    runner = runtime._loaded.runner
    runner.on_logits = lambda plan, logits: caught.append(logits.clone())
    runtime.generate([ids], SamplingParams(temperature=0, max_tokens=1))
    runner.on_logits = None
    return caught[-1][0]
