"""`lamina.vllm`: a script of vLLM changes one import, and gets what Lamina's own runtime says.

The facts are those of vLLM 0.23: names, defaults, orders and shapes.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

import lamina
from lamina.common.errors import RequestError, UnsupportedError
from lamina.vllm import (
    LLM,
    BeamSearchParams,
    CompletionOutput,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TokensPrompt,
)

GREEDY = {"temperature": 0.0, "max_tokens": 5}
# The fields that scripts use, in vLLM's order, with vLLM's defaults after its own checks.
FACTS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "output_kind": RequestOutputKind.CUMULATIVE,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "structured_outputs": None,
}


@pytest.fixture(scope="module")
def llm(tiny_text_folder):
    return LLM(model=str(tiny_text_folder), enforce_eager=True, dtype="float32", gpu_memory_utilization=0.5)


@pytest.fixture(scope="module")
def own(tiny_text_folder):
    with lamina.Runtime.from_pretrained(tiny_text_folder, compile=False, dtype="float32") as runtime:
        yield runtime


def test_parameters_have_the_names_the_order_and_the_defaults_of_vllm():
    params = SamplingParams()
    assert {name: getattr(params, name) for name in FACTS} == FACTS
    assert [field.name for field in dataclasses.fields(params)][: len(FACTS)] == list(FACTS)
    assert SamplingParams(2).n == 2


def test_parameters_are_put_in_form_as_vllm_does():
    params = SamplingParams(stop="x", stop_token_ids=[5, 5, 3], bad_words=["a", "a"], seed=-1, logprobs=True)
    assert (params.stop, params.stop_token_ids, params.bad_words) == (["x"], [5, 3], ["a"])
    assert (params.seed, params.logprobs) == (None, 1)
    assert SamplingParams(temperature=0.001).temperature == 0.01
    greedy = SamplingParams(temperature=0, top_p=0.5, top_k=7, min_p=0.1)
    assert (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, 0, 0.0)
    assert SamplingParams.from_optional(top_k=None, temperature=None, n=2) == SamplingParams(n=2)


def test_parameters_may_be_changed_and_a_clone_shares_nothing():
    params = SamplingParams(stop=["x"])
    other = params.clone()
    other.stop.append("y")
    other.max_tokens = 3
    assert (params.stop, params.max_tokens) == (["x"], 16)
    assert other.to_lamina().max_tokens == 3
    assert other.to_lamina().stop == ("x", "y")


@pytest.mark.parametrize(
    "given",
    [
        {"logprobs": -1},
        {"spaces_between_special_tokens": False},
        {"extra_args": {"x": 1}},
    ],
)
def test_parameters_that_cannot_be_honoured_are_refused_by_name(given):
    with pytest.raises(UnsupportedError, match=next(iter(given))):
        SamplingParams(**given)


def test_a_form_of_the_answer_is_kept(llm):
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(choice=["left", "right"]), max_tokens=20
    )
    assert llm.generate("x", params)[0].outputs[0].text in ("left", "right")
    with pytest.raises(UnsupportedError, match="structural_tag"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a", structural_tag="{}"))
    with pytest.raises(RequestError, match="wanted a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})


@pytest.mark.parametrize(
    "given",
    [
        *({"top_p": 0.0}, {"temperature": -1}, {"max_tokens": 0}, {"n": 2, "temperature": 0}, {"top_k": -2}),
        *({"temperature": None}, {"top_p": None}, {"repetition_penalty": None}, {"stop": 5}),
        *(
            {"stop": {"a": 1}},
            {"stop_token_ids": 5},
            {"stop_token_ids": [[1]]},
            {"bad_words": 5},
            {"bad_words": [["a"]]},
        ),
    ],
)
def test_parameters_that_are_wrong_are_value_errors_by_name(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        SamplingParams(**given)


def test_an_answer_is_that_of_the_runtime_in_lists(llm, own):
    prompts = ["hello the world", [5, 6, 7], {"prompt": "th"}, TokensPrompt(prompt_token_ids=[9, 10])]
    outputs = llm.generate(prompts, SamplingParams(**GREEDY, logprobs=2, prompt_logprobs=0), use_tqdm=False)
    expected = own.generate(["hello the world", [5, 6, 7], "th", [9, 10]], lamina.SamplingParams(**GREEDY))
    for output, wanted in zip(outputs, expected, strict=True):
        assert isinstance(output, RequestOutput)
        assert isinstance(output.outputs[0], CompletionOutput)
        assert output.outputs[0].text == wanted.text
        assert output.outputs[0].token_ids == list(wanted.outputs[0].token_ids)
        assert output.prompt_token_ids == list(wanted.prompt_token_ids)
        assert isinstance(output.outputs[0].logprobs, list)
        assert output.prompt_logprobs[0] is None
        assert output.finished
        assert output.outputs[0].finished()
    assert [output.prompt for output in outputs] == ["hello the world", None, "th", None]


def test_sixteen_tokens_are_the_default(llm):
    assert len(llm.generate([5], SamplingParams(ignore_eos=True))[0].outputs[0].token_ids) == 16


def test_one_prompt_one_each_and_priorities(llm):
    params = [SamplingParams(**GREEDY), SamplingParams(temperature=0, max_tokens=2)]
    outputs = llm.generate([{"prompt_token_ids": [5], "cache_salt": "a"}, [6]], params, priority=[1, 0])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 2]
    assert [output.prompt_token_ids for output in outputs] == [[5], [6]]
    assert len(llm.generate("hello", SamplingParams(**GREEDY))) == 1
    assert llm.generate([], SamplingParams()) == []
    with pytest.raises(RequestError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate([[5], [6]], [SamplingParams()])


def test_a_chat_is_that_of_the_runtime_with_neutral_sampling(llm, own):
    messages = [{"role": "user", "content": "hello"}]
    wanted = own.chat(messages, lamina.SamplingParams(**GREEDY))
    assert llm.chat(messages, SamplingParams(**GREEDY))[0].outputs[0].text == wanted.text
    both = llm.chat([messages, messages], SamplingParams(**GREEDY), use_tqdm=False)
    assert [output.outputs[0].text for output in both] == [wanted.text] * 2
    template = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    ids = llm.chat(messages, SamplingParams(**GREEDY), chat_template=template)[0].prompt_token_ids
    assert llm.get_tokenizer().decode(ids).endswith("<hello>")
    assert llm.get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize("asked", [{"add_generation_prompt": False}, {"chat_template_kwargs": {"x": 1}}])
def test_a_chat_of_parts_reads_as_their_text_whatever_else_is_asked(llm, asked):
    of_text, of_parts = (
        llm.chat([{"role": "user", "content": content}], SamplingParams(**GREEDY), **asked)[0]
        for content in ("hello", [{"type": "text", "text": "hello"}])
    )
    assert of_parts.prompt_token_ids == of_text.prompt_token_ids
    told = llm.get_tokenizer().decode(of_text.prompt_token_ids)
    assert told.endswith("</s>" if "add_generation_prompt" in asked else "[assistant]")


@pytest.mark.parametrize(
    "messages, asked",
    [
        ("hi", {}),
        (None, {}),
        ({"role": "user", "content": "x"}, {}),
        ([[]], {"add_generation_prompt": False}),
        ([None], {"add_generation_prompt": False}),
        ([{"role": "user", "content": "\ud800"}], {"add_generation_prompt": False}),
        ([{"role": "user", "content": "x"}], {"chat_template": "{% if"}),
        ([{"role": "user", "content": "x"}], {"chat_template": "{{ raise_exception('no') }}"}),
        ([{"role": "user", "content": "x"}], {"chat_template_kwargs": {"messages": []}}),
        ([{"role": "user", "content": "x"}], {"chat_template_kwargs": 5}),
        ([{"role": "user", "content": "x"}], {"add_generation_prompt": "yes"}),
    ],
)
def test_a_chat_that_cannot_be_read_is_refused_by_name(llm, messages, asked):
    with pytest.raises(RequestError, match=r"messages|prompt|template"):
        llm.chat(messages, SamplingParams(**GREEDY), **asked)


@pytest.mark.parametrize(
    "prompts",
    [
        *(None, 5, 2.5, object(), b"ab", [b"ab"], torch.tensor(5), [None], [[None]], [np.array([1, 2])]),
        *({"prompt": 5}, {"prompt_token_ids": "hello"}, {"prompt": "a", "cache_salt": ["x"]}),
        *({"prompt": "a", "cache_salt": 0}, {"prompt": ["a"]}, {"prompt_token_ids": 5}),
        *(range(10**12), {"prompt_token_ids": range(10**12)}, itertools.count()),
    ],
)
def test_what_is_no_prompt_is_a_request_error(llm, prompts):
    with pytest.raises(RequestError, match=r"prompt|cache_salt"):
        llm.generate(prompts, SamplingParams(**GREEDY))


@pytest.mark.parametrize(
    "prompts", [np.array([5, 6]), [np.int64(5), 6], iter([5, 6]), {"prompt_token_ids": np.array([5, 6])}]
)
def test_integers_of_any_library_are_one_prompt(llm, prompts):
    (output,) = llm.generate(prompts, SamplingParams(**GREEDY))
    assert output.prompt_token_ids == [5, 6]


@pytest.mark.parametrize("priority", [["a"], [[1]], [None], [10**400], "a"])
def test_a_priority_that_is_none_is_refused_by_name(llm, priority):
    with pytest.raises(RequestError, match="priority"):
        llm.generate([[5]], SamplingParams(**GREEDY), priority=priority)


@pytest.mark.parametrize("params", [None, lamina.BeamSearchParams(beam_width=2), 5])
def test_beam_parameters_of_another_kind_are_refused(llm, params):
    with pytest.raises(RequestError, match=r"wanted a BeamSearchParams of lamina.vllm"):
        llm.beam_search([[5]], params)


def test_a_beam_search_gives_prompt_and_answer_together(llm, own):
    (output,) = llm.beam_search([{"prompt_token_ids": [5, 6]}], BeamSearchParams(beam_width=2, max_tokens=3))
    wanted = own.beam_search([[5, 6]], lamina.BeamSearchParams(beam_width=2, max_tokens=3))[0]
    answers = [[5, 6, *answer.token_ids] for answer in wanted.outputs]
    assert [sequence.tokens for sequence in output.sequences] == answers
    assert output.sequences[0].cum_logprob == pytest.approx(wanted.outputs[0].cumulative_logprob)
    with pytest.raises(UnsupportedError, match="temperature"):
        llm.beam_search([[5]], BeamSearchParams(beam_width=2, max_tokens=3, temperature=1.0))


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel is 3"),
        ({"pipeline_parallel_size": 99}, "pipeline_parallel is 99.*wanted at most one stage a layer"),
        ({"distributed_executor_backend": "external"}, "executor is 'external'"),
        ({"speculative_config": {"model": "x"}}, "speculative_config"),
        ({"enable_lora": True}, "enable_lora"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype is 'fp8_e5m2'"),
        ({"quantization": "awq"}, "quantization is 'awq'"),
        ({"generation_config": "folder"}, "generation_config"),
        ({"gpu_memory_utilisation": 0.5}, "did you mean 'gpu_memory_utilization'"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused_by_name(tiny_folder, settings, said):
    with pytest.raises((UnsupportedError, ValueError), match=said):
        LLM(str(tiny_folder), enforce_eager=True, **settings)


@pytest.mark.parametrize("name", ["lora_request", "tokenization_kwargs"])
def test_arguments_that_cannot_be_honoured_are_refused_by_name(llm, name):
    with pytest.raises(UnsupportedError, match=name):
        llm.generate([5], SamplingParams(), **{name: {"x": 1}})
    with pytest.raises(UnsupportedError, match="multi_modal_data"):
        llm.generate({"prompt": "x", "multi_modal_data": {}}, SamplingParams())
    with pytest.raises(AttributeError, match="LLM has no 'embed' here"):
        llm.embed("x")
    with pytest.raises(RequestError, match=r"wanted a SamplingParams of lamina.vllm"):
        llm.generate([5], lamina.SamplingParams())
