"""Forms beside bad_words and allowed_token_ids: an answer of the form, or an error that says why."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import RequestError, Runtime, SamplingParams, StructuredOutputs

pytest.importorskip("llguidance")
OBJECT = {
    "type": "object",
    "properties": {"a": {"enum": [1, 23, "hello", True]}, "b": {"enum": ["world", None]}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMS = {
    "choice": StructuredOutputs(choice=["hello world", "help", "x", "yes"]),
    "one choice": StructuredOutputs(choice=["hello world"]),
    "object": StructuredOutputs(json=OBJECT, compact=True),
    "regex": StructuredOutputs(regex="[a-e]{2,4}(x|yz)"),
    "reasoning": StructuredOutputs(choice=["x", "yes"], reasoning_begin="<", reasoning_end=">"),
}
PATTERNS = {
    "choice": "hello world|help|x|yes",
    "one choice": "hello world",
    "regex": "[a-e]{2,4}(x|yz)",
    "reasoning": "(?s:<.*>[ \n]{0,3})?(x|yes)",
}


@pytest.fixture(scope="module", params=[None, "ngram"])
def runtime(request, tiny_text_folder):
    with Runtime.from_pretrained(
        tiny_text_folder, dtype="float32", compile=False, speculative=request.param
    ) as made:
        yield made


def asked(runtime, params):
    """The answer, or None and why there is none."""
    try:
        return runtime.generate(["hello w"], params)[0].outputs[0], ""
    except RequestError as error:
        return None, str(error)


def has_form(name, text):
    if name != "object":
        return re.fullmatch(PATTERNS[name], text) is not None
    found = json.loads(text)
    return found["a"] in OBJECT["properties"]["a"]["enum"]


@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
def test_an_answer_has_the_form_and_no_bad_word_or_it_is_said_why(runtime, name, data):
    texts = st.sampled_from([*"hxyelo{}:,\"123abde<>'", "he", "hello", "wor", "world", "true", "yz"])
    ids = {token for text in 'helo wrdxys{}":,123tuanb<>cz' for token in runtime.tokenizer.encode(text)[1:]}
    pairs = st.lists(st.sampled_from(sorted(ids)), min_size=1, max_size=2)
    words = data.draw(st.lists(st.one_of(texts, pairs), min_size=1, max_size=6))
    temperature, seed = data.draw(st.sampled_from([0.0, 1.0])), data.draw(st.integers(0, 99))
    params = SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=24,
        bad_words=words,
        structured_outputs=FORMS[name],
    )
    answer, error = asked(runtime, params)
    if answer is None:
        assert re.search("structured_outputs .*bad_words", error), error
        return
    if answer.finish_reason == "stop":
        assert has_form(name, answer.text)
    for word in words:
        if isinstance(word, list):
            tokens = answer.token_ids
            assert word not in [[*tokens[at : at + len(word)]] for at in range(len(tokens))]


REFUSED = {
    "the first": (
        StructuredOutputs(json_object=True, compact=True),
        {"bad_words": ["{", '{"', "{}"]},
        "bad_words",
    ),
    "a later one": (
        StructuredOutputs(choice=["a world"]),
        {"bad_words": [" w", "wor", "w", "r"]},
        "bad_words",
    ),
    "behind the prompt": (StructuredOutputs(choice=["a"]), {"bad_words": ["xa"]}, "bad_words"),
    "not among": (StructuredOutputs(choice=["ab"]), {"allowed_token_ids": [100]}, "allowed_token_ids"),
    "the end": (StructuredOutputs(choice=["a"]), {"bad_words": [[2]]}, "bad_words"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_form_cannot_begin_without_is_refused_before_it_is_queued(runtime, name):
    form, excluded, said = REFUSED[name]
    before = runtime.stats()["requests"]
    with pytest.raises(RequestError, match=f"structured_outputs has for token .* only tokens that {said}"):
        runtime.generate("x", SamplingParams(structured_outputs=form, **excluded))
    assert runtime.stats()["requests"] == before


def test_what_comes_behind_the_last_token_that_is_asked_for_is_not_looked_at(runtime):
    form = StructuredOutputs(choice=["a world"])
    word = runtime.tokenizer.encode("d")[-1]
    params = SamplingParams(structured_outputs=form, bad_words=[[word]], max_tokens=2)
    assert runtime.generate("x", params)[0].outputs[0].finish_reason == "length"


def test_the_end_of_reasoning_is_not_excluded(tiny_text_folder, bbpe_tokenizer):
    tokenizer = bbpe_tokenizer()
    tokenizer.add_tokens(["</think>"])
    end = tokenizer.convert_tokens_to_ids("</think>")
    form = StructuredOutputs(choice=["a"], reasoning_end="</think>")
    settings = {"dtype": "float32", "compile": False, "tokenizer": tokenizer}
    with Runtime.from_pretrained(tiny_text_folder, **settings) as runtime:
        for excluded in ({"bad_words": [[end]]}, {"bad_words": ["</think>"]}, {"allowed_token_ids": [5, 6]}):
            with pytest.raises(RequestError, match=r"'</think>' at the end of reasoning, which \w+ "):
                runtime.generate("x", SamplingParams(structured_outputs=form, **excluded))
        optional = StructuredOutputs(choice=["a"], reasoning_end="</think>", reasoning_begin="<think>")
        params = SamplingParams(structured_outputs=optional, bad_words=[[end], "<"], max_tokens=9)
        assert runtime.generate("x", params)[0].text == "a"
