"""What chats may be given: parts, tool calls, variables, a template, an answer to go on with."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import SamplingParams
from lamina.common.errors import RequestError
from lamina.runtime.tokenization.tokenizer import Tokenizer

USER = {"role": "user", "content": "hello"}
PRINTS_CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.fixture
def tokenizer(bbpe_tokenizer: Callable[[], Any]) -> Tokenizer:
    return Tokenizer(bbpe_tokenizer())


def text_of(tokenizer: Tokenizer, *messages: Any, **settings: Any) -> str:
    ids = tokenizer.apply_chat_template(list(messages), **settings)
    return tokenizer.decode(ids, skip_special_tokens=False)


def call(arguments: Any, **function: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments, **function}}],
    }


# Content


@given(texts=st.lists(st.text("hello \n", max_size=5), max_size=4))
def test_parts_of_text_are_the_text_that_they_are_together(bbpe_tokenizer: Any, texts: list[str]) -> None:
    tokenizer = Tokenizer(bbpe_tokenizer())
    parts = [{"type": "text", "text": text} for text in texts]
    joined = text_of(tokenizer, {"role": "user", "content": "".join(texts)})
    assert text_of(tokenizer, {"role": "user", "content": parts}) == joined


def test_a_template_that_reads_parts_itself_gets_them(tokenizer: Tokenizer) -> None:
    template = (
        "{% for m in messages %}{% for part in m['content'] %}<{{ part.text }}>{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text_of(tokenizer, {"role": "user", "content": parts}, chat_template=template) == "<a><b>"


@pytest.mark.parametrize(
    "content, message",
    [
        (
            [{"type": "image_url", "image_url": {"url": "x"}}],
            r"\[1\]\['content'\]\[0\] is of type 'image_url'",
        ),
        (
            [{"type": "text", "text": "a"}, {"type": "input_audio"}],
            r"\[1\]\['content'\]\[1\] is of type 'inp",
        ),
        ([{"type": "text"}], r"\[1\]\['content'\]\[0\]\['text'\] is None; wanted a text"),
        ([{"text": "a"}], r"\[1\]\['content'\]\[0\] is {'text': 'a'}; wanted {'type': 'text'"),
        (["a"], r"\[1\]\['content'\]\[0\] is 'a'; wanted"),
        (7, r"\[1\]\['content'\] is 7; wanted a text or a list"),
        ({"type": "text", "text": "a"}, r"\[1\]\['content'\] is {.*}; wanted a text or a list"),
        (b"a", r"\[1\] holds no plain data"),
    ],
    ids=str,
)
def test_content_that_is_no_text_is_refused_by_its_place_and_type(
    tokenizer: Tokenizer, content: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=f"messages{message}"):
        text_of(tokenizer, USER, {"role": "user", "content": content})


# Tool calls


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}', ' {"x": 1}\n'])
def test_arguments_of_a_tool_call_may_be_json(tokenizer: Tokenizer, arguments: Any) -> None:
    text = text_of(tokenizer, USER, call(arguments), chat_template=PRINTS_CALLS)
    assert text == "[user]hello[assistant]f x=1"


def test_a_template_that_wants_arguments_as_text_gets_them_as_given(tokenizer: Tokenizer) -> None:
    template = "{% for c in messages[1].tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    assert text_of(tokenizer, USER, call('{"x":  1}'), chat_template=template) == 'f{"x":  1}'


@pytest.mark.parametrize("calls", [[], None, ()])
def test_no_tool_calls_are_none(tokenizer: Tokenizer, calls: Any) -> None:
    template = "{{ 'tool_calls' in messages[0] }}{{ messages[0].content }}"
    message = {"role": "assistant", "content": "a", "tool_calls": calls}
    assert text_of(tokenizer, message, chat_template=template) == "Falsea"


@pytest.mark.parametrize(
    "template", ["{{ messages[1].content | trim }}", "{{ messages[1]['content'] + 'a' }}"]
)
def test_a_message_of_tool_calls_alone_needs_no_content(tokenizer: Tokenizer, template: str) -> None:
    message = {**call("{}"), "content": None}
    assert text_of(tokenizer, USER, message, chat_template=template + "|") in ("|", "a|")


@pytest.mark.parametrize(
    "calls, message",
    [
        (call("{x}")["tool_calls"], r"\[0\]\['function'\]\['arguments'\] is '{x}', no JSON"),
        (call("[1]")["tool_calls"], r"\[0\]\['function'\]\['arguments'\] is '\[1\]'; wanted a JSON object"),
        (call(7)["tool_calls"], r"\[0\]\['function'\]\['arguments'\] is 7; wanted a JSON object"),
        (call({}, name=7)["tool_calls"], r"\[0\]\['function'\]\['name'\] is 7; wanted the name"),
        ([{"function": "f"}], r"\[0\]\['function'\] is 'f'; wanted {'name'"),
        (["f"], r"\[0\] is 'f'; wanted {'function'"),
        ("f", r" is 'f'; wanted a list of calls"),
        (7, r" is 7; wanted a list of calls"),
        (call("{" * 60_000)["tool_calls"], r"\[0\]\['function'\]\['arguments'\] is '{{"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_tool_call_that_cannot_be_read_is_named_by_its_places(
    tokenizer: Tokenizer, calls: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=rf"messages\[1\]\['tool_calls'\]{message}") as caught:
        text_of(tokenizer, USER, {"role": "assistant", "tool_calls": calls}, chat_template=PRINTS_CALLS)
    assert len(str(caught.value)) < 1000


# The template


def test_variables_reach_the_template(tokenizer: Tokenizer) -> None:
    template = "{{ enable_thinking }}{{ more.deep[1] }}{{ bos_token }}"
    variables = {"enable_thinking": False, "more": {"deep": [1, 2]}}
    assert text_of(tokenizer, USER, chat_template=template, template_kwargs=variables) == "False2<s>"


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"template_kwargs": {"messages": []}}, "template_kwargs has 'messages'"),
        ({"template_kwargs": {"tools": []}}, "template_kwargs has 'tools'; wanted as an argument"),
        ({"template_kwargs": "x"}, "template_kwargs is 'x'; wanted a dict"),
        ({"template_kwargs": {1: 2}}, "template_kwargs is {1: 2}; wanted a dict"),
        ({"template_kwargs": {"f": print}}, "template_kwargs holds no plain data"),
        ({"chat_template": ""}, "chat_template is ''; wanted the text of a template"),
        ({"chat_template": 7}, "chat_template is 7; wanted the text of a template"),
        ({"chat_template": "{{ x"}, "the chat template refuses these messages"),
        ({"continue_final_message": 1}, "continue_final_message is 1; wanted True or False"),
    ],
    ids=str,
)
def test_what_no_template_can_be_given_is_named(
    tokenizer: Tokenizer, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        text_of(tokenizer, USER, **settings)


@given(text=st.text("hel lo\n{}<|>", max_size=12))
def test_an_answer_to_go_on_with_ends_where_its_text_does(bbpe_tokenizer: Any, text: str) -> None:
    tokenizer = Tokenizer(bbpe_tokenizer())
    messages = [USER, {"role": "assistant", "content": text}]
    closed = text_of(tokenizer, *messages, add_generation_prompt=False)
    assert text_of(tokenizer, *messages, continue_final_message=True) == closed.removesuffix("</s>")


def test_an_answer_to_go_on_with_is_stripped_where_the_template_strips(tokenizer: Tokenizer) -> None:
    template = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"
    last = {"role": "assistant", "content": " go on "}
    text = text_of(tokenizer, USER, last, chat_template=template, continue_final_message=True)
    assert text == "<hello><go on"


@pytest.mark.parametrize("last", [call("{}"), {"role": "assistant", "content": None}])
def test_an_answer_without_text_cannot_be_gone_on_with(tokenizer: Tokenizer, last: Any) -> None:
    with pytest.raises(
        RequestError, match="continue_final_message is True, but the last message's content is"
    ):
        text_of(tokenizer, USER, last, continue_final_message=True)


def test_every_way_to_chat_takes_the_same_arguments(open_runtime: Any, tiny_text_folder: Any) -> None:
    runtime = open_runtime(tiny_text_folder)
    own = {"chat_template": "{{ word }}{{ messages[0].content }}", "template_kwargs": {"word": "hello"}}
    params = SamplingParams(max_tokens=2, temperature=0)
    prompt = runtime.apply_chat_template([USER], **own)
    assert runtime._open.tokenizer.decode(prompt) == "hellohello"
    whole = runtime.chat([USER], params, **own)
    assert whole.prompt_token_ids == tuple(prompt)
    assert "".join(d.text for d in runtime.stream_chat([USER], params, **own)) == whole.outputs[0].text
    with pytest.raises(TypeError, match="chat_templat"):
        runtime.chat([USER], params, chat_templat="x")


class Contrary(list[Any]):
    def __iter__(self) -> Any:
        raise OSError("no")


class ContraryText(str):
    __slots__ = ()

    def __len__(self) -> int:
        return -1

    def __contains__(self, text: object) -> bool:
        raise OSError("no")


def test_what_classes_of_the_caller_raise_is_named(tokenizer: Tokenizer) -> None:
    held = Contrary(["x"])
    with pytest.raises(RequestError, match=r"messages\[0\] holds no plain data: OSError"):
        tokenizer.apply_chat_template([{"role": "user", "content": held}])
    with pytest.raises(RequestError, match=r"template_kwargs holds no plain data: OSError"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], template_kwargs={"x": held})


def test_a_template_of_a_class_of_its_own_is_the_text_it_is(tokenizer: Tokenizer) -> None:
    template, messages = "{{ messages[0]['content'] }}", [{"role": "user", "content": "x"}]
    wanted = tokenizer.apply_chat_template(messages, chat_template=template)
    assert tokenizer.apply_chat_template(messages, chat_template=ContraryText(template)) == wanted
