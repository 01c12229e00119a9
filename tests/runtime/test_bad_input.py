"""Bad requests and bad settings: the error names the thing and the remedy, and others go on."""

import dataclasses

import pytest
import torch

from lamina import ConfigError, RequestError, Runtime, SamplingParams, StoreError, UnsupportedError

GREEDY = SamplingParams(temperature=0, max_tokens=4)
POOL = {"max_model_len": 64, "block_size": 4, "num_kv_blocks": 9}  # 32 tokens

BAD_PROMPTS = [
    ([], "prompts is empty"),
    ([[]], r"the prompt is empty \(0 tokens\); give at least one token"),
    ("", "a text prompt needs a tokenizer.*give token ids or tokenizer="),
    ("text", "a text prompt needs a tokenizer"),
    ([1, 2, 320], "token 320 at position 2 is outside the vocabulary; ids must be 0 to 319"),
    ([-1], "token -1 at position 0 is outside the vocabulary"),
    ([10**30], "outside the vocabulary"),
    ([1.0, 2], "token 1.0 at position 0 is no integer"),
    ([True], "token True at position 0 is no integer"),
    ([None], "token None at position 0 is no integer"),
    ([1, "a"], "token 'a' at position 1 is no integer"),
    ([[[1]]], r"token \[1\] at position 0 is no integer"),
    (list(range(64)), "64 tokens, but max_model_len 64.*shorten the prompt or raise max_model_len"),
    (list(range(33)), "33 tokens, but the whole KV cache holds 32; shorten the prompt, or raise num_kv_b"),
    (b"text", "prompts is b'text'; wanted text, token ids, or a list of either"),
    ([b"text"], "the prompt is bytes"),
    (None, "prompts is None"),
    (7, "prompts is 7"),
    ({1: 2}, "prompts is {1: 2}"),
    (torch.tensor([1, 2]), r"prompts is tensor\(\[1, 2\]\)"),
]
BAD_PARAMS = [
    (5, "params is 5; wanted one SamplingParams, or a list of 2, one for each prompt"),
    ({"max_tokens": 3}, "params is {'max_tokens': 3}"),
    ([GREEDY], "a list of 2"),
    ([GREEDY] * 3, "a list of 2"),
    ([GREEDY, "x"], r"prompts\[1\]: params is 'x'; wanted a SamplingParams"),
    (
        SamplingParams(stop="x"),
        r"stop is \('x',\), but there is no text to look for it in; use stop_token_ids",
    ),
    (SamplingParams(detokenize=True), "detokenize=True needs a tokenizer"),
    (
        SamplingParams(stop_token_ids=[320]),
        "stop_token_ids holds 320; wanted ids of the vocabulary, 0 to 319",
    ),
    (SamplingParams(logit_bias={"999999": 5}), "logit_bias holds 999999; wanted ids of the vocabulary"),
    (SamplingParams(allowed_token_ids=[5, 320]), "allowed_token_ids holds 320; wanted ids of the vocabulary"),
    (SamplingParams(bad_words=[[5, 320]]), "bad_words holds 320; wanted ids of the vocabulary"),
    (SamplingParams(bad_words=["word"]), "bad_words='word' needs a tokenizer"),
]
BAD_SAMPLING = [
    ("n", 0),
    ("n", None),
    ("n", 1.5),
    ("best_of", 0),
    ("logprobs", -1),
    ("logprobs", True),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", "1"),
    ("max_tokens", 0),
    ("max_tokens", 2.5),
    ("max_tokens", "3"),
    ("min_tokens", -1),
    ("temperature", -0.5),
    ("temperature", "hot"),
    ("temperature", float("nan")),
    ("top_k", -5),
    ("top_k", 1.5),
    ("top_p", 0),
    ("top_p", 1.5),
    ("min_p", 2),
    ("typical_p", 0),
    ("presence_penalty", 3),
    ("frequency_penalty", "x"),
    ("repetition_penalty", 0),
    ("logit_bias", {"abc": 1}),
    ("logit_bias", {-1: 1}),
    ("allowed_token_ids", []),
    ("bad_words", [""]),
    ("logits_processors", [5]),
    ("structured_outputs", 5),
    ("seed", 2**63),
    ("seed", "x"),
    ("stop", 3),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop_token_ids", 5),
    ("stop_token_ids", ["x"]),
    ("ignore_eos", "yes"),
    ("include_stop_str_in_output", None),
    ("skip_special_tokens", 1),
    ("detokenize", "x"),
]
BAD_SETTINGS = [
    ("memory_fraction", [0, 1.5, -1, float("nan"), "x", True, None, 1e-12]),
    ("max_model_len", [0, 1, 257, "9", 2.0, True]),
    ("max_num_seqs", [0, -1, None, "4"]),
    ("max_num_batched_tokens", [0, 10**6, 2.5]),
    ("prefill_chunk", [0, "7"]),
    ("block_size", [0, -4, 2**50]),
    ("num_kv_blocks", [0, 1, 10**13, "9"]),
    ("compile", ["yes", 1, None]),
    ("numerics", ["precise", None, []]),
    ("quantization", ["int4", "INT8", 8, True, []]),
    ("load_format", ["gguf", None]),
    ("dtype", ["int8", "fp32", torch.int8, 8, None]),
    ("device", ["tpu", "meta", None, 5, []]),
    ("attention", [None, 5]),
    ("cache_dir", [5, b"x"]),
    ("tokenizer", [5]),
    ("require_warm", ["x", None]),
    ("generation_defaults", ["x", 1]),
    ("seed", ["x", 1.5, None, True]),
    ("revision", [5]),
    ("token", [5]),
    ("model", [None, 5, b"x"]),
]


@pytest.fixture(scope="module")
def runtime(tiny_folder):
    with Runtime.from_pretrained(tiny_folder, compile=False, **POOL) as runtime:
        yield runtime


@pytest.fixture
def goes_on(runtime, is_idle):
    """Whatever a test does, the runtime answers as before, and nothing of it is left."""
    right = runtime.generate([[5]], GREEDY)[0].outputs[0].token_ids
    finished = runtime.stats()["requests"]["finished"]
    yield
    is_idle(runtime)
    assert runtime.stats()["requests"]["finished"] == finished, "a request of a refused call was started"
    assert runtime.generate([[5]], GREEDY)[0].outputs[0].token_ids == right


@pytest.mark.usefixtures("goes_on")
@pytest.mark.parametrize("prompts, message", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_by_what_is_wrong_with_it(runtime, prompts, message):
    with pytest.raises(RequestError, match=message):
        runtime.generate(prompts, GREEDY)
    with pytest.raises(RequestError):
        runtime.stream(prompts, GREEDY)


@pytest.mark.usefixtures("goes_on")
@pytest.mark.parametrize("bad", [[], [1, 320], [1.5], [True], "text", list(range(40))], ids=str)
def test_a_batch_with_one_bad_prompt_names_it_and_starts_none(runtime, bad):
    with pytest.raises(RequestError, match=r"^prompts\[2\]: "):
        runtime.generate([[1], [2, 3], bad, [4]], GREEDY)


@pytest.mark.usefixtures("goes_on")
@pytest.mark.parametrize("params, message", BAD_PARAMS)
def test_bad_params_are_refused_by_what_is_wrong_with_them(runtime, params, message):
    with pytest.raises(RequestError, match=message):
        runtime.generate([[1], [2]], params)


@pytest.mark.parametrize("name, value", BAD_SAMPLING)
def test_a_bad_sampling_parameter_is_named_with_what_was_wanted(name, value):
    with pytest.raises(RequestError, match=rf"^{name} (is|holds) .*; wanted "):
        SamplingParams(**{name: value})


def test_every_sampling_parameter_has_a_value_that_is_refused():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {name for name, _ in BAD_SAMPLING} == fields


def test_an_unknown_sampling_parameter_is_a_type_error_that_names_it():
    with pytest.raises(TypeError, match="max_token"):
        SamplingParams(max_token=3)


@pytest.mark.usefixtures("goes_on")
def test_chats_need_a_tokenizer(runtime):
    messages = [{"role": "user", "content": "hello"}]
    for ask in (runtime.chat, runtime.stream_chat):
        with pytest.raises(RequestError, match=r"a chat needs a tokenizer.*give token ids or tokenizer="):
            ask(messages)


@pytest.mark.parametrize("messages", [[], "hello", [{}], [{"content": "x"}], 5, {"role": "user"}], ids=str)
def test_bad_messages_are_refused(open_runtime, tiny_text_folder, messages):
    with pytest.raises(RequestError, match="message"):
        open_runtime(tiny_text_folder).chat(messages)


def test_an_empty_text_is_a_prompt_only_where_the_tokenizer_makes_a_token_of_it(
    open_runtime, tiny_text_folder, bbpe_tokenizer
):
    output = open_runtime(tiny_text_folder).generate("", GREEDY)[0]
    assert output.prompt_token_ids == (1,)
    tokenizer = bbpe_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(RequestError, match=r"prompts\[1\]: the prompt is empty"):
        open_runtime(tokenizer=tokenizer).generate(["ok", ""], GREEDY)


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD_SETTINGS for value in values])
def test_a_bad_setting_is_named_with_what_was_wanted(tiny_folder, name, value):
    settings = {"model": tiny_folder, "compile": False} | {name: value}
    with pytest.raises(ConfigError, match=name) as raised:
        Runtime.from_pretrained(settings.pop("model"), **settings)
    assert any(word in str(raised.value) for word in ("wanted", "lower", "raise", "supported"))


def test_an_unknown_setting_is_a_type_error_that_names_it(tiny_folder):
    with pytest.raises(TypeError, match="max_len"):
        Runtime.from_pretrained(tiny_folder, max_len=5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "settings, message",
    [
        ({"device": "cuda"}, "device is 'cuda'.*use device='cpu'"),
        ({"attention": "cuda"}, "cuda.*(auto|cpu)"),
        ({"attention": "flash"}, "attention is 'flash'; wanted auto, .*reference"),
        ({"attention": "cpu", "dtype": "float64"}, "cpu does not take torch.float64; use provider 'auto'"),
    ],
    ids=str,
)
def test_what_was_chosen_and_cannot_run_here_is_refused_and_not_replaced(tiny_folder, settings, message):
    with pytest.raises(UnsupportedError, match=message):
        Runtime.from_pretrained(tiny_folder, compile=False, **settings)


def test_a_cache_folder_that_cannot_be_made_is_named(tiny_folder):
    with pytest.raises(StoreError, match=r"config\.json.*set LAMINA_CACHE_DIR"):
        Runtime.from_pretrained(tiny_folder, compile=False, cache_dir=tiny_folder / "config.json")


def test_the_most_requests_asked_for_may_exceed_what_a_step_can_hold(open_runtime):
    runtime = open_runtime(max_num_seqs=10**12, max_num_batched_tokens=64)
    assert runtime.stats()["resolved"]["max_num_seqs"] == 64
