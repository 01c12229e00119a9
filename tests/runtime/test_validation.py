"""What passes validation is plain and small; what is refused is named, clipped, before work is spent."""

import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina import BeamSearchParams, CompileConfig, ConfigError, LaminaError, RequestError, SamplingParams
from lamina.common.errors import MOST_SAID, clipped, shown
from lamina.runtime.config import RuntimeConfig
from lamina.runtime.request_options import RequestOptions

HUGE = "x" * 60_000
GREEDY = SamplingParams(temperature=0, max_tokens=3)
REFUSED = [
    (RequestOptions, "cache_salt", "\ud800", "lone surrogates"),
    (RequestOptions, "cache_salt", HUGE * 2, "of 120000 characters; wanted at most 65536"),
    (RequestOptions, "priority", 10**400, "an integer of 1329 bits; wanted an integer"),
    (RequestOptions, "priority", 2**31 + 1, "wanted an integer, -2147483648 to 2147483648"),
    (RequestOptions, "priority", torch.tensor(0.5), "wanted an integer"),
    (RequestOptions, "timeout", torch.tensor([1.0, 2.0]), "wanted a number, of seconds"),
    (SamplingParams, "min_tokens", 2**63, "at most 2147483647"),
    (SamplingParams, "n", 10**9, "at most 4096"),
    (SamplingParams, "best_of", 4097, "at most 4096"),
    (SamplingParams, "bad_words", ["x"] * 60_000, "more than 1024 entries"),
    (SamplingParams, "bad_words", [[1] * 60_000], "more than 64 entries"),
    (SamplingParams, "bad_words", [HUGE] * 2, "120000 characters in all; wanted at most 65536"),
    (SamplingParams, "bad_words", ["a\udc00"], "lone surrogates"),
    (SamplingParams, "stop", ["a", "b\ud800"], "lone surrogates"),
    (SamplingParams, "stop", itertools.repeat("x"), "more than 4096 entries"),
    (SamplingParams, "stop_token_ids", itertools.count(), "more than 4096 entries"),
    (SamplingParams, "allowed_token_ids", itertools.repeat(5), "more than 1048576 entries"),
    (SamplingParams, "logit_bias", dict.fromkeys(range(20_000), 1.0), "more than 16384 entries"),
    (SamplingParams, "logit_bias", {5: float("nan")}, "wanted a number, -100 to 100"),
    (SamplingParams, "logit_bias", {"9" * 5000: 1}, "wanted a token id"),
    (SamplingParams, "temperature", torch.tensor(True), "wanted a number"),
    (SamplingParams, "logits_processors", [len] * 65, "more than 64 entries"),
    (BeamSearchParams, "beam_width", 513, "at most 512"),
    (BeamSearchParams, "stop_token_ids", [1] * 17, "more than 16 entries"),
    (RuntimeConfig, "seed", 2**63, "wanted an integer, a signed 64-bit one"),
    (RuntimeConfig, "max_num_seqs", 10**30, "at most 9223372036854775807"),
    (RuntimeConfig, "dtype", HUGE, "wanted at most 4095 bytes"),
    (RuntimeConfig, "cache_dir", "a\0b", "no NUL"),
    (RuntimeConfig, "attention", "\ud800", "without surrogates"),
    (RuntimeConfig, "tensor_parallel", 0, "wanted an integer, from 1 to 1024"),
    (RuntimeConfig, "tensor_parallel", True, "wanted an integer, from 1 to 1024"),
    (RuntimeConfig, "executor", "threads", "wanted auto or uniproc or multiproc or ray"),
    (RuntimeConfig, "executor", np.array(["ray"]), "wanted auto or uniproc"),
    (RuntimeConfig, "ray_placement", "STRICT_PACK", "wanted strict_pack or pack or spread"),
    (RuntimeConfig, "numerics", np.array(["fast", "x"]), "wanted fast or exact"),
]


@pytest.mark.parametrize("kind, name, value, wanted", REFUSED, ids=lambda value: shown(value, 30))
def test_what_cannot_be_honoured_is_refused_by_name_and_clipped(kind, name, value, wanted):
    others = {"model": "m"} if kind is RuntimeConfig else {}
    with pytest.raises(LaminaError, match=rf"^{name}\b.*{wanted}") as raised:
        kind(**others | {name: value})
    assert isinstance(raised.value, ConfigError if kind is RuntimeConfig else RequestError)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("one", [1, np.int64(1), np.uint8(1), np.array(1), torch.tensor(1)], ids=repr)
def test_whoever_made_a_number_it_is_stored_as_a_plain_one(one):
    params = SamplingParams(n=one, max_tokens=one, seed=one, temperature=one, stop_token_ids=[one])
    options = RequestOptions(priority=one, timeout=one)
    config = RuntimeConfig(model="m", max_num_seqs=one, seed=one, memory_fraction=one)
    integers = params.n, params.max_tokens, params.seed, options.priority, config.max_num_seqs, config.seed
    assert {type(value) for value in (*integers, *params.stop_token_ids)} == {int}
    assert {type(value) for value in (params.temperature, options.timeout, config.memory_fraction)} == {float}


@pytest.mark.parametrize("text", ["a book " * 10**6, *(one * 10**7 for one in "a é")], ids=lambda x: x[:3])
def test_a_text_far_too_long_is_refused_by_its_beginning(open_runtime, tiny_text_folder, text):
    runtime = open_runtime(tiny_text_folder)
    tracemalloc.start()
    try:
        for ask in (runtime.generate, lambda x, _: runtime.chat([{"role": "user", "content": x}])):
            with pytest.raises(RequestError, match=r"the prompt has \d+ characters.*shorten the prompt"):
                ask(text, GREEDY)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(text) + 2**25
    finally:
        tracemalloc.stop()


def test_what_has_few_tokens_is_a_prompt_however_long_it_is(open_runtime, worded):
    tokenizer, _ = worded("x" * 500)
    runtime = open_runtime(tokenizer=tokenizer)
    text = "x" * 500 * 200  # ten times what is looked at before
    assert len(runtime.generate(text, GREEDY)[0].prompt_token_ids) <= 201


@pytest.mark.parametrize("prompt", [range(10**12), range(2**70)], ids=str)
def test_ids_without_end_are_refused_before_they_are_copied(open_runtime, prompt):
    with pytest.raises(RequestError, match="tokens, but max_model_len"):
        open_runtime().generate(prompt, GREEDY)


def test_a_surrogate_in_a_prompt_or_a_message_is_refused(open_runtime, tiny_text_folder):
    runtime = open_runtime(tiny_text_folder)
    with pytest.raises(RequestError, match="lone surrogates"):
        runtime.generate("a\ud800", GREEDY)
    with pytest.raises(RequestError, match="surrogates"):
        runtime.chat([{"role": "user", "content": "a\ud800"}], GREEDY)


class Contrary(str):
    def __len__(self):
        return -1

    def __str__(self):
        raise OSError

    encode = __eq__ = __iter__ = __len__
    __hash__ = str.__hash__


def test_a_text_of_a_class_of_its_own_is_read_as_the_text_it_is(open_runtime, tiny_text_folder):
    runtime, text = open_runtime(tiny_text_folder), Contrary("hello")
    options = {"cache_salt": text}
    params = SamplingParams(max_tokens=4, temperature=0.0, stop=text, bad_words=[text])
    assert params == SamplingParams(max_tokens=4, temperature=0.0, stop="hello", bad_words=["hello"])
    wanted = runtime.generate("hello", params)[0].outputs
    assert runtime.generate(text, params, **options)[0].outputs == wanted
    assert "".join(delta.text for delta in runtime.stream(text, params)) == wanted[0].text
    with pytest.raises(RequestError, match="wanted one SamplingParams"):
        runtime.generate("hello", text)


class Unspeakable:
    def __repr__(self):
        raise SystemExit


@given(st.recursive(st.text() | st.binary() | st.integers() | st.floats(), st.lists))
def test_any_value_is_shown_in_few_characters(value):
    assert len(shown(value)) <= 80
    assert shown(value).encode()


@pytest.mark.parametrize("value", [HUGE, [HUGE] * 9, 10**5000, [10**5000], Unspeakable(), "\ud800"], ids=type)
def test_odd_values_are_shown_as_well(value):
    assert len(shown(value)) <= 80
    assert shown(value).encode()


def test_an_error_keeps_the_beginning_and_the_end_of_a_text_that_is_too_long():
    error = RequestError("field is " + HUGE + "; wanted less")
    assert len(str(error)) < MOST_SAID + 100
    assert str(error).startswith("field is xx")
    assert str(error).endswith("; wanted less")
    assert clipped("short") == "short"


def test_how_actors_lie_is_a_setting_of_the_ray_executor_alone():
    with pytest.raises(ConfigError, match="ray_placement is 'pack' and executor 'auto'; wanted"):
        RuntimeConfig(model="m", ray_placement="pack")
    assert RuntimeConfig(model="m", executor="ray", ray_placement="pack").parallel.ray_placement == "pack"


def test_several_engines_may_have_any_executor_of_processes():
    for executor in ("multiproc", "ray"):
        assert RuntimeConfig(model="m", executor=executor, data_parallel=2).parallel.data_parallel == 2


@pytest.mark.parametrize("passes", [0, 5, "", "lower", False, {}, print], ids=repr)
def test_passes_are_none_or_several(passes):
    with pytest.raises(ConfigError, match=r"passes is .*; wanted None or a tuple"):
        CompileConfig(passes=passes)
    assert CompileConfig(passes=()).passes == ()


def test_exact_numerics_and_batch_invariance_exclude_each_other():
    """Exact keeps the sums of the model's own GEMMs, which libraries make in another order for more rows."""
    with pytest.raises(ConfigError, match="numerics is 'exact' and batch_invariant True; wanted one"):
        RuntimeConfig(model="m", numerics="exact", compile=CompileConfig(batch_invariant=True))
    assert RuntimeConfig(model="m", numerics="exact", compile=CompileConfig()).numerics == "exact"
