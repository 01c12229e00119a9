"""Tokenizing: one BOS, transformers' own chat templates, and a caller's tokenizer left as it was."""

import copy
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.common.errors import LoadError, RequestError
from lamina.runtime.tokenization.tokenizer import Tokenizer, load_tokenizer

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "héllo <s> 😀"},
    {"role": "assistant", "content": " hi"},
    {"role": "user", "content": "and?"},
]
EVERY_GLOBAL = (
    "{{ bos_token }}{{ strftime_now('%Y-%m-%d') }}{% if messages|length > 9 %}"
    "{{ raise_exception('too long') }}{% endif %}"
    "{{ messages[0]|tojson }}{{ tools|tojson(indent=2) if tools }}"
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}\n    {{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(params=["bbpe", "spm"])
def backend(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"{request.param}_tokenizer")()


@pytest.fixture
def folder(bbpe_tokenizer: Callable[[], Any], tmp_path: Path) -> Path:
    bbpe_tokenizer().save_pretrained(tmp_path)
    return tmp_path


# Encoding and decoding


def test_plain_text_gets_the_bos_that_the_tokenizer_adds(bbpe_tokenizer: Callable[[], Any]) -> None:
    tokenizer = Tokenizer(bbpe_tokenizer())
    ids = tokenizer.encode("hello")
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(ids[0]) == 1
    assert ids[1:] == tokenizer.encode("hello", add_special_tokens=False)


def test_a_rendered_chat_template_gets_no_second_bos(backend: Any) -> None:
    tokenizer = Tokenizer(backend)
    rendered = backend.apply_chat_template(MESSAGES[2:], tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(rendered)
    assert ids == tokenizer.apply_chat_template(MESSAGES[2:])
    assert ids.count(backend.bos_token_id) == 1


@given(text=st.one_of(st.text(), st.text().map(lambda text: f"<s>{text}")), explicit=st.booleans())
def test_an_explicit_choice_about_special_tokens_is_followed(
    bbpe_tokenizer: Callable[[], Any], text: str, explicit: bool
) -> None:
    expected = bbpe_tokenizer().encode(text, add_special_tokens=explicit)
    assert Tokenizer(bbpe_tokenizer()).encode(text, add_special_tokens=explicit) == expected


@given(text=st.text(), skip=st.booleans())
def test_text_comes_back_as_transformers_decodes_it(
    bbpe_tokenizer: Callable[[], Any], text: str, skip: bool
) -> None:
    tokenizer, backend = Tokenizer(bbpe_tokenizer()), bbpe_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)


def test_an_unknown_id_has_no_text(backend: Any) -> None:
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([tokenizer.size + 10]) == ""


@pytest.mark.parametrize("prompt", ["\ud800", "a\udfffb", 7, None, b"bytes"])
def test_a_prompt_that_is_no_text_is_refused(backend: Any, prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        Tokenizer(backend).encode(prompt)


def test_size_counts_up_to_the_highest_id_even_over_gaps() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    gaps = Backend(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    assert Tokenizer(PreTrainedTokenizerFast(tokenizer_object=gaps)).size == 10


def test_special_and_byte_tokens_are_known(
    bbpe_tokenizer: Callable[[], Any], spm_tokenizer: Callable[[], Any]
) -> None:
    bbpe, spm = Tokenizer(bbpe_tokenizer()), Tokenizer(spm_tokenizer())
    assert set(bbpe.special_tokens.values()) >= {"<s>", "</s>", "<|end|>"}
    assert (len(bbpe.byte_token_ids), len(spm.byte_token_ids)) == (0, 256)
    assert bbpe.eos_token_ids == (2,)


# Chat templates


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]])
def test_templates_see_every_global_that_transformers_offers(
    backend: Any, add_generation_prompt: bool, tools: list[dict[str, Any]] | None
) -> None:
    backend.chat_template = EVERY_GLOBAL
    settings = {"add_generation_prompt": add_generation_prompt, "tools": tools}
    ids = Tokenizer(backend).apply_chat_template(MESSAGES, **settings)
    assert ids == backend.apply_chat_template(MESSAGES, return_dict=False, **settings)
    assert datetime.now().strftime("%Y-") in backend.decode(ids)


def test_a_template_that_refuses_says_why(backend: Any) -> None:
    backend.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate"):
        Tokenizer(backend).apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    "template", ["{{ nothing.at.all }}", "{% if %}", "{{ 1 + 'a' }}", "{{ 1 / 0 }}", "{{ messages[9].role }}"]
)
def test_a_broken_template_is_an_error_of_the_request(backend: Any, template: str) -> None:
    backend.chat_template = template
    with pytest.raises(RequestError, match="chat template"):
        Tokenizer(backend).apply_chat_template(MESSAGES)


def test_a_tokenizer_without_a_template_says_what_to_do(backend: Any) -> None:
    backend.chat_template = None
    with pytest.raises(RequestError, match=r"no chat template; add chat_template\.jinja"):
        Tokenizer(backend).apply_chat_template(MESSAGES)


@pytest.mark.parametrize("messages", [[], "hi", {"role": "user"}, 7, ["hi"], [{"content": "no role"}], None])
def test_messages_of_the_wrong_shape_are_refused(backend: Any, messages: Any) -> None:
    with pytest.raises(RequestError, match="message"):
        Tokenizer(backend).apply_chat_template(messages)


@pytest.mark.parametrize("tools", ["weather", {"type": "function"}, 7, ["weather"], [None]])
def test_tools_of_the_wrong_shape_are_refused(backend: Any, tools: Any) -> None:
    backend.chat_template = EVERY_GLOBAL
    with pytest.raises(RequestError, match=r"^tools is .*; wanted a list of JSON schemas"):
        Tokenizer(backend).apply_chat_template(MESSAGES, tools=tools)


def test_tools_that_a_template_would_not_mention_are_refused(backend: Any) -> None:
    """A parameter that is taken is honoured."""
    tokenizer = Tokenizer(backend)
    with pytest.raises(RequestError, match="chat template does not read tools"):
        tokenizer.apply_chat_template(MESSAGES, tools=[{"type": "function"}])
    assert tokenizer.apply_chat_template(MESSAGES, tools=[]) == tokenizer.apply_chat_template(MESSAGES)
    backend.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools|tojson }}"}
    with_tools = Tokenizer(backend).apply_chat_template(MESSAGES, tools=[{"type": "function"}])
    assert backend.decode(with_tools) == '[{"type": "function"}]'


def test_a_message_that_is_no_text_is_refused(backend: Any) -> None:
    with pytest.raises(RequestError, match="lone surrogates"):
        Tokenizer(backend).apply_chat_template([{"role": "user", "content": "\ud800"}])


def test_messages_stay_the_callers(backend: Any) -> None:
    messages = copy.deepcopy(MESSAGES)
    Tokenizer(backend).apply_chat_template(messages)
    assert messages == MESSAGES


# Loading


def test_a_loaded_tokenizer_equals_the_one_of_auto_tokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    for text in ("hello world", "<s>hello</s>", " 12  3,4\n", "héllo 😀"):
        assert ours.encode(text, add_special_tokens=True) == theirs.encode(text)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.apply_chat_template(MESSAGES) == theirs.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )


def test_a_tokenizer_tells_its_tokens_and_roles_as_transformers_does(folder: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    ids = ours.encode("héllo world")
    assert ours.names_of(ids) == theirs.convert_ids_to_tokens(ids)
    assert ours.names_of([-1, 10**9]) == [None, None]
    told = ours.describe()
    for role in ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template"):
        assert told[role] == getattr(theirs, role)
    assert Tokenizer(theirs).names_of(ids) == ours.names_of(ids)
    assert {**Tokenizer(theirs).describe(), "tokenizer_class": ""} == {**told, "tokenizer_class": ""}


def test_of_several_templates_the_default_is_told(backend: Any) -> None:
    backend.chat_template = {"default": "a", "tool_use": "b"}
    assert Tokenizer(backend).describe()["chat_template"] == "a"
    backend.chat_template = None
    assert Tokenizer(backend).describe()["chat_template"] is None


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    "name,damage",
    [
        *(
            (name, damage)
            for name in ("tokenizer.json", "tokenizer_config.json")
            for damage in ("", "{", "null", "[" * 100_000)
        ),
        ("tokenizer_config.json", '{"eos_token": 5}'),
        ("tokenizer.json", '{"model": {}}'),
    ],
)
def test_a_damaged_file_is_named(folder: Path, name: str, damage: str) -> None:
    (folder / name).write_text(damage)
    with pytest.raises(LoadError, match=r"eos_token is 5" if "eos" in damage else name):
        load_tokenizer(folder)


def test_an_override_folder_replaces_the_models_own(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    empty = tmp_path_factory.mktemp("empty")
    for override in (folder, str(folder)):
        tokenizer = load_tokenizer(empty, override=override)
        assert tokenizer is not None
        assert tokenizer.encode("hello")
    with pytest.raises(LoadError, match="tokenizer is"):
        load_tokenizer(folder, override=empty)


def test_a_callers_tokenizer_is_left_as_it_was(backend: Any, tmp_path: Path) -> None:
    backend.padding_side = "left"
    backend.backend_tokenizer.enable_padding(length=40)
    backend.backend_tokenizer.enable_truncation(max_length=3)

    def state() -> tuple[Any, ...]:
        attributes = {name: value for name, value in vars(backend).items() if name != "_tokenizer"}
        return backend.backend_tokenizer.to_str(), copy.deepcopy(attributes), backend.chat_template

    before = state()
    tokenizer = load_tokenizer(tmp_path, override=backend)
    assert tokenizer is not None
    ids = tokenizer.encode("hello world and more")
    assert len(ids) not in (3, 40)
    tokenizer.decode(ids)
    tokenizer.apply_chat_template(MESSAGES)
    assert state() == before


def test_later_changes_to_a_callers_tokenizer_do_not_reach_ours(backend: Any, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, override=backend)
    assert tokenizer is not None
    before = tokenizer.apply_chat_template(MESSAGES)
    backend.chat_template = "{{ raise_exception('changed') }}"
    assert tokenizer.apply_chat_template(MESSAGES) == before


def test_transformers_is_not_imported_until_there_is_a_tokenizer_to_load(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from lamina.runtime.tokenization.tokenizer import load_tokenizer;"
        f"assert load_tokenizer(Path({str(tmp_path)!r})) is None; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
