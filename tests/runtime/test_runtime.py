"""TINY models through the whole runtime give the tokens of transformers, however they are served."""

import pytest
import torch

from lamina import CompileConfig, SamplingParams

NUM_TOKENS = 64
NEAR_TIE = 1e-4  # in float32, where the oracle's two best logits are closer, either may win
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [
    [5],
    [1, 2, 3],
    list(range(40, 70)),
    [7] * 33,
    [300, 3] * 50,
    [(17 * place) % 320 for place in range(150)],
]
WAYS_TO_SERVE = [
    {"block_size": 4},
    {"block_size": 16},
    {"prefill_chunk": 1},
    {"prefill_chunk": 2},
    {"prefill_chunk": 5, "block_size": 4},
    {"prefill_chunk": 7},
    {"prefill_chunk": 16, "block_size": 4},
    {"max_num_batched_tokens": 9},
    {"max_num_batched_tokens": 3, "block_size": 1},
    {"max_num_seqs": 2, "prefill_chunk": 7},
    {"num_kv_blocks": 60, "block_size": 4},
]


class Oracle:
    """transformers' greedy tokens for each prompt, with the lead of its best logit over the second."""

    def __init__(self, model):
        self.answers = [self._answer(model, prompt) for prompt in PROMPTS]

    def _answer(self, model, prompt):
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        best = [logits[0].topk(2).values for logits in output.logits]
        return output.sequences[0, len(prompt) :].tolist(), [float(top[0] - top[1]) for top in best]

    def check(self, answers, near_tie=0.0):
        """Token for token the same, in float32 up to a place where the oracle itself could not decide."""
        assert len(answers) == len(PROMPTS)
        for number, (answer, (right, leads)) in enumerate(zip(answers, self.answers, strict=True)):
            assert len(answer) == len(right)
            places = [place for place, pair in enumerate(zip(answer, right, strict=True)) if len({*pair}) > 1]
            if places:
                print(f"prompt {number} leaves the oracle at token {places[0]}, lead {leads[places[0]]:.2e}")
                assert leads[places[0]] < near_tie


@pytest.fixture(scope="module")
def wide(tiny_folder):
    """The oracle in float64."""
    from transformers import LlamaForCausalLM

    options = {"dtype": torch.float64, "attn_implementation": "eager"}
    return Oracle(LlamaForCausalLM.from_pretrained(tiny_folder, **options).eval())


@pytest.fixture(scope="module")
def narrow(tiny_folder, tiny_reference):
    """The oracle in float32."""
    return Oracle(tiny_reference(tiny_folder))


def alone(runtime):
    return [tokens(runtime.generate([prompt], GREEDY)[0]) for prompt in PROMPTS]


def together(runtime):
    return [tokens(output) for output in runtime.generate(PROMPTS, GREEDY)]


def streamed(runtime):
    return [[t for delta in runtime.stream(p, GREEDY) for t in delta.token_ids] for p in PROMPTS]


def tokens(output):
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("serve", [alone, together, streamed])
def test_float64_tokens_are_exactly_those_of_transformers(open_runtime, wide, serve):
    wide.check(serve(open_runtime(dtype="float64")))


@pytest.mark.parametrize("settings", WAYS_TO_SERVE, ids=str)
def test_blocks_chunks_budgets_and_preemption_change_no_token_in_float64(open_runtime, wide, settings):
    runtime = open_runtime(dtype="float64", **settings)
    wide.check(together(runtime))
    assert (runtime.stats()["preemptions"] > 0) == ("num_kv_blocks" in settings)


@pytest.mark.parametrize("serve", [alone, together, streamed])
def test_float32_tokens_are_those_of_transformers(open_runtime, narrow, serve):
    narrow.check(serve(open_runtime(dtype="float32")), NEAR_TIE)


@pytest.mark.parametrize("settings", [*WAYS_TO_SERVE, {"attention": "reference"}], ids=str)
def test_blocks_chunks_budgets_and_preemption_change_no_token_in_float32(open_runtime, narrow, settings):
    narrow.check(together(open_runtime(dtype="float32", **settings)), NEAR_TIE)


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_compiled_tokens_are_those_of_transformers(open_runtime, narrow, compile_cache, graphs):
    """With cuda_graphs="on", a CPU pads every step to a captured size and runs on static tensors."""
    config = CompileConfig(cuda_graphs=graphs)
    runtime = open_runtime(dtype="float32", compile=config, cache_dir=compile_cache)
    for serve in (alone, together, streamed):
        narrow.check(serve(runtime), NEAR_TIE)
    stats = runtime.stats()
    assert (stats["compile"]["pieces"], stats["compile"]["unique_pieces"]) == (3, 3)
    assert stats["compile"]["recompiles"] == 0
    assert (stats["cuda_graphs"]["replays"] > 0) == (graphs == "on")


@pytest.mark.parametrize("settings", [{}, {"prefill_chunk": 7, "block_size": 4}], ids=str)
def test_exact_numerics_give_the_same_tokens_compiled_and_not(open_runtime, compile_cache, settings):
    settings = {"dtype": "float32", "numerics": "exact"} | settings
    eager = open_runtime(**settings)
    compiled = open_runtime(**settings, compile=True, cache_dir=compile_cache)
    for serve in (alone, together):
        assert serve(compiled) == serve(eager)


def test_exact_numerics_give_the_tokens_of_transformers(open_runtime, narrow):
    narrow.check(together(open_runtime(dtype="float32", numerics="exact")), NEAR_TIE)


def test_a_head_dim_of_its_own_sizes_the_cache_and_gives_the_tokens_of_transformers(
    open_runtime, make_tiny_folder, tiny_reference
):
    folder = make_tiny_folder(head_dim=32)
    runtime = open_runtime(folder)
    caches = runtime._loaded.runner._attention._caches
    assert {cache.shape[-1] for of_layer in caches for cache in of_layer} == {32}
    Oracle(tiny_reference(folder)).check(together(runtime), NEAR_TIE)
