"""batch_invariant in serving: logits of requests in mixes have the bits that they have alone."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import CompileConfig, NGram, Runtime, SamplingParams
from lamina.common.errors import ConfigError, UnsupportedError
from lamina.common.progress import say_nothing
from lamina.runtime import batch_invariance
from lamina.runtime.batch_invariance import check_batch_invariance
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.startup.description import describe
from lamina.runtime.startup.identity import system_fingerprint

from ..families import FAMILIES

MODE = CompileConfig(batch_invariant=True, verify=False)
LENGTHS = (1, 2, 17, 40, 66)


def config_of(folder, **changes):
    settings = {"model": folder, "device": "cpu", "compile": MODE, "max_model_len": 128, "num_kv_blocks": 200}
    return RuntimeConfig(**settings | changes)


@pytest.fixture(autouse=True)
def _short_prompts(monkeypatch):
    monkeypatch.setattr(batch_invariance, "LENGTHS", LENGTHS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_the_same_in_any_mix(tiny_folder, dtype):
    """With captured steps and without, in chunks, with prefixes found, and preempted."""
    found = check_batch_invariance(config_of(tiny_folder, dtype=dtype), [[5, 6, 7]], 10, say_nothing)
    assert found.is_right, found
    assert found.num_logits > 300
    assert found.num_cached_tokens
    assert found.num_preemptions


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gemma2", "bfloat16"), ("qwen3", "float32"), ("phi3", "bfloat16"), ("llama-chunks", "float32")],
)
def test_logits_are_the_same_with_windows_caps_and_norms_of_heads(tmp_path, name, dtype):
    found = check_batch_invariance(config_of(FAMILIES[name].save(tmp_path), dtype=dtype), [], 5, say_nothing)
    assert found.is_right, found


def test_without_the_mode_they_are_not_and_the_first_call_is_named(tiny_folder):
    """float32, whose GEMMs of many rows are the library's otherwise."""
    config = config_of(tiny_folder, dtype="float32", compile=CompileConfig(verify=False))
    found = check_batch_invariance(config, [], 5, say_nothing)
    assert not found.is_right
    num_prompts = 3 + len(LENGTHS) + len(batch_invariance.BLOCKS_OF_PROMPTS)  # 3: those of verify
    assert {one.prompt for one in found.mismatches} <= set(range(num_prompts))
    assert all(one.num_ids and one.largest > 0 for one in found.mismatches)
    assert found.first is not None
    assert re.match(r"the first piece, result \d+, of prompt \d+ ", found.first)


def test_a_swapped_prefix_gives_the_logits_that_it_gave_before(tiny_folder):
    """With blocks that come back from the host, as with those that never left."""
    prompts = [[(7 * i + j) % 300 for j in range(60)] for i in range(6)]
    asked = SamplingParams(temperature=0.0, max_tokens=40, logprobs=20)

    def answers(**changes):
        settings = config_of(tiny_folder, dtype="float32", **changes)
        with Runtime(settings) as runtime:
            outputs = runtime.generate(prompts, asked)
            stats = runtime.stats()
        found = [(one.outputs[0].token_ids, logprobs_of(one)) for one in outputs]
        return found, stats["preemptions"]

    right, none = answers(num_kv_blocks=200)
    swapped, some = answers(num_kv_blocks=24, swap_bytes=1 << 20)
    assert (none, some > 0) == (0, True)
    assert swapped == right


def logprobs_of(output):
    return [
        sorted((token, one.logprob) for token, one in step.items()) for step in output.outputs[0].logprobs
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_of_tokens_and_of_prompts_are_the_same_beside_others(tiny_folder, dtype):
    prompts = [[(11 * i + j) % 300 for j in range(1 + 7 * i)] for i in range(12)]
    asked = SamplingParams(temperature=0.0, max_tokens=4, logprobs=5, prompt_logprobs=3)
    with Runtime(config_of(tiny_folder, dtype=dtype)) as runtime:
        together = runtime.generate(prompts, asked)
        for prompt, beside in zip(prompts, together, strict=True):
            (alone,) = runtime.generate([prompt], asked, cache_salt="alone")
            assert beside.outputs[0].logprobs == alone.outputs[0].logprobs
            assert beside.prompt_logprobs == alone.prompt_logprobs


@pytest.fixture(scope="module")
def runtimes(tiny_folder):
    """One that takes prompts in chunks of 23 without a captured step, and one that does neither."""
    chunks = {
        "prefill_chunk": 23,
        "compile": CompileConfig(batch_invariant=True, verify=False, cuda_graphs="off"),
    }
    settings = {"dtype": "float32", "max_num_batched_tokens": 100}
    with (
        Runtime(config_of(tiny_folder, **settings)) as whole,
        Runtime(config_of(tiny_folder, **settings | chunks)) as cut,
    ):
        yield whole, cut


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(1, 6)), min_size=1, max_size=12),
    st.sampled_from(["", "cold"]),
    st.booleans(),
)
def test_any_requests_together_get_the_logprobs_of_each_alone(runtimes, requests, salt, is_cut):
    """Prompts that begin alike or not, of any length, found in the prefix cache or not, cut or whole."""
    whole, cut = runtimes
    prompts = [[(97 * kind + 7 * at) % 300 for at in range(length)] for kind, length, _ in requests]
    asked = [SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=20) for *_, tokens in requests]
    together = (cut if is_cut else whole).generate(prompts, asked, cache_salt=salt)
    for number, (prompt, params) in enumerate(zip(prompts, asked, strict=True)):
        (alone,) = whole.generate([prompt], params, cache_salt=f"alone {number}")
        assert together[number].outputs[0].logprobs == alone.outputs[0].logprobs


def test_a_seed_gives_the_same_answer_beside_any_number_of_others(tiny_folder):
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=12)
    others = SamplingParams(temperature=1.0, max_tokens=9)
    with Runtime(config_of(tiny_folder, dtype="bfloat16")) as runtime:
        found = set()
        for count in (0, 1, 6, 32):
            prompts = [[4, 5, 6], *([1 + number] * (1 + number) for number in range(count))]
            answer, *_ = runtime.generate(prompts, [params, *[others] * count])
            found.add(answer.outputs[0].token_ids)
    assert len(found) == 1


def test_the_mode_has_plans_and_a_fingerprint_of_its_own(tiny_folder):
    fingerprints, keys = [], []
    for compiled in (MODE, CompileConfig(verify=False)):
        with Runtime(config_of(tiny_folder, dtype="bfloat16", compile=compiled)) as runtime:
            loaded = runtime._loaded
            fingerprints.append(system_fingerprint(loaded))
            keys.append({piece.artifact.key for piece in loaded.compiled.plan.pieces})
            assert describe(loaded).settings["batch_invariant"] == compiled.batch_invariant
    assert re.fullmatch(r"fp_batch_invariant_[0-9a-f]{24}", fingerprints[0])
    assert re.fullmatch(r"fp_[0-9a-f]{24}", fingerprints[1])
    assert not keys[0] & keys[1]


def test_what_cannot_be_had_in_the_mode_is_refused_by_name(tiny_folder):
    for changes, named in (
        ({"quantization": "int8"}, "quantization of .* is 'int8' and batch_invariant True"),
        ({"quantization": "fp8"}, "quantization of .* is 'fp8' and batch_invariant True"),
        ({"attention": "triton"}, "attention is 'triton' and batch_invariant True"),
    ):
        with pytest.raises(UnsupportedError, match=named):
            Runtime(config_of(tiny_folder, **changes))
    with pytest.raises(ConfigError, match="compile is False"):
        check_batch_invariance(config_of(tiny_folder, compile=False), [], 1, say_nothing)
    with pytest.raises(ConfigError, match="batch_invariant is 1; wanted True or False"):
        CompileConfig(batch_invariant=1)


def test_weights_in_four_bits_are_the_same_in_any_mix(tiny_folder):
    found = check_batch_invariance(
        config_of(tiny_folder, dtype="bfloat16", quantization="w4a16"), [], 5, say_nothing
    )
    assert found.is_right, found


def test_drafts_change_no_bit_of_any_logprob(tiny_folder):
    """However many drafts are verified beside a token; answers repeat themselves, so that some hold."""
    prompts = [[5, 6, 7, 8] * 5, [9, 10, 11] * (2 + 5), [40, 41] * 9, list(range(60, 90)) * 2]
    asked = [
        SamplingParams(temperature=heat, top_k=2, seed=3, max_tokens=40, logprobs=5, ignore_eos=True)
        for heat in (0.0, 0.0, 0.5, 0.5)
    ]
    found = []
    for speculative in (None, NGram(k=3, min_ngram=1), NGram(k=7, min_ngram=1)):
        with Runtime(config_of(tiny_folder, dtype="bfloat16", speculative=speculative)) as runtime:
            answers = runtime.generate(prompts, asked)
            found.append([one.outputs[0].logprobs for one in answers])
            accepted = runtime.stats()["speculation"]["accepted_tokens"]
            assert (accepted > 0) == (speculative is not None)
    assert found[0] == found[1] == found[2]
