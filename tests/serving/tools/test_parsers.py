"""Calls and reasoning in a text: read alike however it is cut, in linear time, and nothing of it is lost."""

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lamina.common.errors import ConfigError
from lamina.serving.tools.formats import (
    FORMATS,
    REASONING,
    ToolFormat,
    reasoning_tags,
    register_tool_format,
    tool_format,
)
from lamina.serving.tools.parts import merged
from lamina.serving.tools.reader import AnswerReader, message_of
from lamina.serving.tools.reasoning import ReasoningParser

NAMES = ("f", "get_weather")
BY_NAME = {form.name: form for form in FORMATS}
PIECES = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call|>", "functools"),
    *("<|/tool_call|>", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "```tool_code", "```"),
    *("<think>", "</think>", '{"name": "f", "arguments": {', '{"name": "f", "parameters": {"a": ', "}}", "]"),
    *("[f(", "a=", "print(", ")", "True", "'", '"', "\\"),
    *("{", "}", "[", ", ", ";", "\n", " ", "1", "text", "é"),
    *('{"arguments": "{}", "name": "f"}', '"name"', '"arguments": ', "get_weather", "f", "<"),
)
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


def reader_of(name, reasoning=None, is_open=False):
    parser = None if reasoning is None else ReasoningParser(REASONING[reasoning], is_open=is_open)
    return AnswerReader(reasoning=parser, tools=name and BY_NAME[name].parser(NAMES))


def read(reader, pieces):
    parts = [part for piece in pieces for part in reader.feed(piece)]
    return [(part.kind, part.text, part.index) for part in merged(parts + reader.finish())]


def calls_in(name, text):
    message = message_of(reader_of(name), text)
    found = [call["function"] for call in message.get("tool_calls", ())]
    return [(call["name"], json.loads(call["arguments"])) for call in found], message["content"]


@pytest.mark.parametrize("name", sorted(BY_NAME))
@given(text=TEXTS, is_open=st.booleans(), data=st.data())
@example(text='<tool_call>{"name": "f", "arguments": {"a": "}\\"', is_open=False, data=None)
def test_a_text_is_read_alike_wherever_it_is_cut(name, text, is_open, data):
    whole = read(reader_of(name, "think", is_open), [text])
    for place in range(len(text) + 1):
        assert read(reader_of(name, "think", is_open), [text[:place], text[place:]]) == whole
    assert read(reader_of(name, "think", is_open), list(text)) == whole


@pytest.mark.parametrize("name", sorted(BY_NAME))
@given(text=TEXTS)
def test_what_is_no_call_stays_as_it_was_written(name, text):
    found = read(reader_of(name), [text])
    if not any(kind == "call" for kind, _, _ in found):
        assert "".join(piece for _, piece, _ in found) == text
    for kind, piece, _ in found:
        if kind == "content":
            assert piece in text


WRITTEN = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', {"a": 1}),
    ("hermes", '<tool_call>{"arguments": {"a": "</tool_call>"}, "name": "f"}', {"a": "</tool_call>"}),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', {"a": 1}),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', {}),
    ("llama3_json", '{"name": "f", "parameters": {"a": {"b": []}}}', {"a": {"b": []}}),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', {}),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]', {"a": 1}),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', {"a": 1}),
    ("mistral_args", '[TOOL_CALLS]f[ARGS]{"a": 1}', {"a": 1}),
    ("phi4_mini", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>', {"a": 1}),
    ("phi4_mini", 'functools[{"name": "f", "arguments": {"a": 1}}]', {"a": 1}),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', {"a": 1}),
    ("granite", '<tool_call>[{"name": "f", "arguments": {"a": 1}}]', {"a": 1}),
    ("pythonic", "[f(a='it\\'s', b=[True, None, {'c': 1.5}])]", {"a": "it's", "b": [True, None, {"c": 1.5}]}),
    ("pythonic", '<|python_start|>[f(a="\\u00e9\\n")]<|python_end|>', {"a": "é\n"}),
    ("gemma", "```tool_code\nprint(f(a=1))\n```", {"a": 1}),
    ("gemma", "[f(a=1)]", {"a": 1}),
    ("pythonic", '[f(é="\\ud83d\\ude00", b="\\ud800")]', {"é": "😀", "b": "\ud800"}),
    ("hermes", '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>', {"a": "\ud800"}),
]


@pytest.mark.parametrize("name, text, arguments", WRITTEN)
def test_a_call_is_read_as_models_write_it(name, text, arguments):
    assert calls_in(name, text) == ([("f", arguments)], None)


@pytest.mark.parametrize(
    "name, text",
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n' * 2),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}},{"name": "f", "arguments": {"a": 1}}]',
        ),
        ("mistral_args", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{"a": 1}'),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 1}}'),
        ("pythonic", "[f(a=1), f(a=1)]"),
    ],
)
def test_parallel_calls_have_numbers_and_ids_of_their_own(name, text):
    assert calls_in(name, text) == ([("f", {"a": 1})] * 2, None)
    calls = message_of(reader_of(name), text)["tool_calls"]
    assert len({call["id"] for call in calls}) == 2
    assert [index for kind, _, index in read(reader_of(name), [text]) if kind == "call"] == [0, 1]


@pytest.mark.parametrize(
    "name, text",
    [
        ("hermes", "<tool_call>no JSON</tool_call>"),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("llama3_json", '{"name": "unknown", "parameters": {"a": 1}}'),
        ("llama3_json", '{"answer": {"name": "f"}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[f(a=b)]"),
        ("mistral", "[TOOL_CALLS] none"),
        ("gemma", "```tool_code\nx = 3\n```"),
    ],
)
def test_what_is_like_a_call_and_is_none_is_content(name, text):
    assert calls_in(name, text) == ([], text)


def test_arguments_that_are_no_json_are_told_as_written():
    (call,) = message_of(reader_of("hermes"), '<tool_call>{"name": "f", "arguments": {"a": 1,}}')[
        "tool_calls"
    ]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1,}'}
    message = message_of(reader_of("hermes"), '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>')
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_arguments_come_before_the_call_has_ended():
    reader = reader_of("hermes")
    told = [
        reader.feed(piece) for piece in ('<tool_call>{"name": "f", "arguments": {"a', '": "long', " text")
    ]
    assert [[(part.kind, part.text) for part in parts] for parts in told] == [
        [("call", "f"), ("arguments", '{"a')],
        [("arguments", '": "long')],
        [("arguments", " text")],
    ]


@pytest.mark.parametrize(
    "text, is_open, reasoning, content",
    [
        ("<think>\nWell.\n</think>\n\nYes.", False, "Well.", "Yes."),
        ("Well.\n</think>\n\nYes.", True, "Well.", "Yes."),
        ("<think>Well.</think>Yes.", True, "Well.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, None, "Yes."),
        ("Yes. <think>", False, None, "Yes. <think>"),
        ("Well, that is cut", True, "Well, that is cut", None),
    ],
)
def test_reasoning_stands_beside_content(text, is_open, reasoning, content):
    message = message_of(reader_of(None, "think", is_open), text)
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


REPEATED = (
    *("<tool_call>", "<tool_call", '<tool_call>{"name": "', "<tool_call>{", "[TOOL_CALLS]", "[TOOL_CALLS]{"),
    *("[TOOL_CALLS][", "[TOOL_CALLS]a", '<tool_call>{"name":"f","arguments":{}}', "<tool_call> ", "[f("),
    *(
        "{",
        " ",
        '[f(a="',
        "[f(a=1),",
        "[f(a=1,",
        "```tool_code f",
        "<|python_start|> [",
        "</think",
        "</think> ",
    ),
    *('{"name":"f","parameters":{"a":"', "[f(a=[1,"),
)


@pytest.mark.parametrize("name", sorted(BY_NAME))
@pytest.mark.parametrize("unit", REPEATED)
def test_the_work_is_linear_in_a_text_that_resembles_calls(name, unit):
    """Counted in characters that parsers look at, by the size of what they keep."""
    reader = reader_of(name, "think", True)
    reader.feed("</think>")
    tools = reader.tools
    for _ in range(2000):
        reader.feed(unit)
        assert len(tools.text) - tools.at < 2048
    reader.finish()


def test_half_a_megabyte_that_resembles_calls_is_read():
    """In a second each; with work that grows by the square this would outlast the test's time."""
    for name, unit in itertools.product(sorted(BY_NAME), ("[TOOL_CALLS]a", "<tool_call>{", "[f(a=[1,")):
        reader_of(name).whole(unit * (500_000 // len(unit)))


def test_forms_are_chosen_by_the_template():
    templates = {
        "hermes": "return a json object within <tool_call></tool_call> XML tags",
        "mistral": '{{- "[TOOL_CALLS][" }}',
        "mistral_args": '"[TOOL_CALLS]" + name + "[ARGS]"',
        "granite": "<|tool_call|>",
        "phi4_mini": "<|tool_call|> and <|/tool_call|>",
        "llama3_json": '{"name": function name, "parameters": dictionary of argument name and its value}.',
    }
    assert {name: tool_format("auto", text).name for name, text in templates.items()} == {
        name: name for name in templates
    }
    assert (
        tool_format("auto", "plain")
        is tool_format("auto", None)
        is tool_format("none", "<tool_call>")
        is None
    )
    assert reasoning_tags("auto", "… </think> …").end == "</think>"
    assert reasoning_tags("auto", "plain") is reasoning_tags("none", "</think>") is None
    assert reasoning_tags("qwen3", None) is reasoning_tags("think", None)


def test_a_form_that_only_resembles_another_is_not_chosen():
    assert tool_format("auto", "<tool_call><function=name>") is None  # Qwen3-Coder's, which is no JSON


@pytest.mark.parametrize("name", sorted(BY_NAME))
@pytest.mark.parametrize("tool", ["get-weather", "a.b", "2fa", "_", "-", "print"])
def test_whatever_a_tool_is_called_its_call_is_read(name, tool):
    written = BY_NAME[name].written
    arguments = "a=1" if written.is_python else '{"a": 1}'
    given = json.dumps(tool) if '"name"' in written.around[0] else tool
    call = written.around[0].replace("{name}", given) + arguments + written.around[1]
    reader = AnswerReader(tools=BY_NAME[name].parser([tool]))
    message = message_of(reader, written.begin + call + written.end)
    assert [call["function"] for call in message["tool_calls"]] == [{"name": tool, "arguments": '{"a": 1}'}]


def test_half_characters_stay_escapes():
    for form, text, _ in WRITTEN[-2:]:
        json.dumps(message_of(reader_of(form), text), ensure_ascii=False).encode()
    text = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    assert message_of(reader_of("hermes"), text)["content"] == text


def test_an_answer_of_nothing_has_an_empty_content():
    assert message_of(reader_of("hermes"), "")["content"] == ""


def test_an_unknown_form_is_refused_by_name_and_a_registered_one_is_known():
    with pytest.raises(ConfigError, match="tool_parser is 'nope'; wanted one of auto, none, "):
        tool_format("nope", None)
    with pytest.raises(ConfigError, match="reasoning_parser is 'nope'"):
        reasoning_tags("nope", None)
    hermes = BY_NAME["hermes"]
    own = ToolFormat(name="own", signs=("<own>",), parser=hermes.parser, written=hermes.written)
    register_tool_format(own)
    assert tool_format("own", None) is tool_format("auto", "… <own>") is own
