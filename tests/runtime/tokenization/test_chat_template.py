"""Chat templates render as they do in transformers, and cannot reach what is none of their business."""

import copy
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.runtime.tokenization.chat_template import plain, render

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"é": [1, 2.5, None]}}},
]
CALL = {"arguments": {"a": 1}}
MESSAGES = [
    {"role": "system", "content": "be <brief>", "name": None},
    {"role": "user", "content": [{"type": "text", "text": "héllo 😀"}]},
    {
        "role": "assistant",
        "content": "",
        "thinking": "hm",
        "tool_calls": [{"function": CALL}],
    },
    {"role": "tool", "content": "7°"},
    {"role": "assistant", "content": "it is 7°"},
]
LLAMA = """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- endif %}
{{- "<|system|>\n" + system_message + date_string }}
{%- for t in tools or [] %}
    {{- t | tojson(indent=4) }}{{- "\n\n" }}
{%- endfor %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at once") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"parameters": ' }}{{- call.arguments | tojson }}{{- "}" }}
    {%- elif message.content is string %}
        {{- '<|' + message['role'] + '|>' + message.content | trim + eos_token }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'text' %}{{- part.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
TEMPLATES = {
    "as Llama 3 writes it": LLAMA,
    "blocks, trimmed": (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n  x\n    {% endif %}\n{% endfor %}\n y "
    ),
    "loop controls": (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}"
        "{% if loop.last %}{% break %}{% endif %}[{{ m.role }}]{% endfor %}"
    ),
    "generation marked": (
        "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}|{% endfor %}"
    ),
    "reasoning by each of its names": (
        "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}/{% endfor %}"
    ),
    "fields that say nothing are gone": (
        "{{ 'name' in messages[0] }}{{ messages[0]|length }}{{ messages|tojson }}"
    ),
    "namespaces": (
        "{% set ns = namespace(a=1, self=2) %}"
        "{% for m in messages %}{% set ns.a = ns.a + 1 %}{% endfor %}{{ ns.a }}{{ ns.self }}"
    ),
    "dictionaries": (
        "{{ dict(a=1)['a'] }}{{ dict([('b', 2)]) | items | list }}{{ tools|tojson }}{{ tools|string }}"
    ),
    "json with options": ("{{ messages|tojson(sort_keys=true, separators=(',', ':'), ensure_ascii=true) }}"),
    "what is not given": (
        "{{ documents }}{{ documents is none }}{{ nothing is defined }}{{ tools is none }}"
    ),
    "macros": (
        "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages[3].content) }}"
        "{{ messages|map(attribute='role')|list }}"
    ),
}


def rendered_by_transformers(
    backend: Any, template: str, messages: Any, tools: Any, add_generation_prompt: bool
) -> str:
    backend.chat_template = template
    return backend.apply_chat_template(
        copy.deepcopy(messages), tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
    )


def rendered(backend: Any, template: str, messages: Any, tools: Any, add_generation_prompt: bool) -> str:
    known = backend.special_tokens_map
    return render(
        template, messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **known
    )


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_templates_render_as_transformers_renders_them(
    bbpe_tokenizer: Callable[[], Any], template: str, tools: Any
) -> None:
    backend = bbpe_tokenizer()
    for prompt in (True, False):
        given = (backend, template, MESSAGES, tools, prompt)
        assert rendered(*given) == rendered_by_transformers(*given)


json_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30)
@given(messages=st.lists(st.dictionaries(st.text(max_size=4), json_data, max_size=4), min_size=1, max_size=3))
def test_any_data_reaches_a_template_as_it_does_in_transformers(
    bbpe_tokenizer: Callable[[], Any], messages: list[dict[str, Any]]
) -> None:
    given = (bbpe_tokenizer(), "{{ messages|tojson }}{{ messages }}", messages, None, True)
    assert rendered(*given) == rendered_by_transformers(*given)


def test_data_is_stripped_to_what_json_has() -> None:
    class Role(StrEnum):
        USER = "user"

    class Call:
        def model_dump(self) -> dict[str, Any]:
            return {"name": "f", "arguments": ("a", 1)}

    found = plain({"role": Role.USER, "calls": [Call()], "yes": True})
    assert found == {"role": "user", "calls": [{"name": "f", "arguments": ("a", 1)}], "yes": True}
    assert type(found["role"]) is str
    with pytest.raises(TypeError, match=r"is a object; wanted text, numbers, lists and dicts"):
        plain([object()])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ dict.__init__ }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ '%s'|attr('format')|attr('__globals__') }}",
        "{{ raise_exception.__globals__['os'] }}",
    ],
)
def test_a_template_cannot_reach_python(template: str) -> None:
    try:
        text = render(template, [{"role": "user"}])
    except jinja2.TemplateError:
        return
    assert text == "", "an attribute that is refused has no text"
