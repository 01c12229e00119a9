"""A tokenizer read from its files is the one that transformers reads: ids, text, tokens, templates."""

import copy
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.runtime.tokenization.detokenizer import IncrementalDetokenizer
from lamina.runtime.tokenization.tokenizer import Tokenizer, load_tokenizer
from lamina.runtime.tokenization.tokenizer_file import LONG, TokenizerFile

TEXTS = (
    *("hello world", "<s>hello</s>", " 12  3,4\n", "héllo 😀", "", " ", "\x00\u200b"),
    *("hello<|end|> the hello", "a<tool>b <tool>", "[PAD] and <image> [IMG]"),
)
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "héllo <s> 😀"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "tool_calls": [{"x": [1.5, None]}],
    },
    {"role": "user", "content": "and?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"a": True}}}]
ROLES = (
    "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ image_token }}{{ unk_token }}"
    "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}{{ tools }}{{ documents }}"
)
TOOL_TOKEN = {"content": "<tool>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
END_TOKEN = {**TOOL_TOKEN, "content": "</s>", "special": True}


def set_config(folder: Path, **entries: Any) -> None:
    """Change tokenizer_config.json; None removes an entry."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def edit_json(folder: Path, **entries: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def legacy(folder: Path) -> None:
    """The files of older folders: roles and added tokens in files of their own."""
    set_config(folder, added_tokens_decoder=None, eos_token=None, pad_token=None)
    roles = {"eos_token": {**TOOL_TOKEN, "content": "<|end|>"}, "pad_token": "[PAD]"}
    write(folder, "special_tokens_map.json", roles | {"extra_special_tokens": ["[IMG]"]})
    write(folder, "added_tokens.json", {"<tool>": 400, "</s>": 2})


VARIANTS = {
    "as saved": lambda folder: None,
    "a role that tokenizer.json does not know": lambda folder: set_config(folder, pad_token="[PAD]"),
    "a role with flags": lambda folder: set_config(
        folder, pad_token={"__type": "AddedToken", **TOOL_TOKEN, "content": "[PAD]"}
    ),
    "a role of this model alone": lambda folder: set_config(folder, image_token="<image>"),
    "named extra tokens": lambda folder: set_config(folder, extra_special_tokens={"image_token": "<image>"}),
    "extra tokens": lambda folder: set_config(folder, extra_special_tokens=["[IMG]", "<image>"]),
    "additional tokens": lambda folder: set_config(
        folder, extra_special_tokens=None, additional_special_tokens=["[IMG]"]
    ),
    "added tokens": lambda folder: set_config(
        folder, added_tokens_decoder={"400": TOOL_TOKEN, "2": END_TOKEN}
    ),
    "legacy files": legacy,
    "special tokens split": lambda folder: set_config(folder, split_special_tokens=True),
    "no BOS": lambda folder: set_config(folder, bos_token=None),
    "truncation and padding": lambda folder: edit_json(
        folder,
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 20},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        },
    ),
    "no post-processor": lambda folder: edit_json(folder, post_processor=None),
    "asked to add a BOS": lambda folder: set_config(folder, add_bos_token=True, add_eos_token=True),
    "template in the config": lambda folder: (
        (folder / "chat_template.jinja").unlink(),
        set_config(folder, chat_template="config{{ messages[0].content }}"),
    ),
    "templates by name in the config": lambda folder: (
        (folder / "chat_template.jinja").unlink(),
        set_config(
            folder,
            chat_template=[
                {"name": "default", "template": "plain"},
                {"name": "tool_use", "template": "tools: {{ tools|tojson }}"},
            ],
        ),
    ),
    "templates by name in files": lambda folder: write(
        folder, "additional_chat_templates/tool_use.jinja", "tools: {{ tools|tojson }}"
    ),
    "no config at all": lambda folder: [
        (folder / name).unlink() for name in ("tokenizer_config.json", "chat_template.jinja")
    ],
}


def rendered(backend: Any, tools: Any, messages: Any = MESSAGES) -> str:
    if not backend.chat_template:
        return "none"
    given = copy.deepcopy(messages)
    return backend.apply_chat_template(given, tools=tools, add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize("kind", ["bbpe", "spm"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_folder_reads_as_transformers_reads_it(
    variant: str, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    saved = request.getfixturevalue(f"{kind}_tokenizer")()
    saved.chat_template = ROLES
    saved.save_pretrained(tmp_path)
    VARIANTS[variant](tmp_path)
    ours, theirs = TokenizerFile(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.get_vocab() == theirs.get_vocab()
    assert repr(ours.added_tokens_decoder) == repr(theirs.added_tokens_decoder)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            assert ours.decode(ids, special) == theirs.decode(ids, skip_special_tokens=special), text
    for tools in (None, TOOLS):
        assert rendered(ours, tools) == rendered(theirs, tools)


@settings(max_examples=15)
@given(text=st.text(), skip=st.booleans())
@pytest.mark.parametrize("kind", ["bbpe", "spm"])
def test_any_text_streams_to_what_transformers_decodes(
    kind: str, request: pytest.FixtureRequest, text: str, skip: bool
) -> None:
    ours, theirs = _both(kind, request)
    ids = Tokenizer(ours).encode(text)
    detokenizer = IncrementalDetokenizer(Tokenizer(ours), skip_special_tokens=skip)
    streamed = "".join([*(detokenizer.append([token_id]) for token_id in ids), detokenizer.finish()])
    assert streamed == theirs.decode(ids, skip_special_tokens=skip)


def _both(kind: str, request: pytest.FixtureRequest, made: dict[str, Any] = {}) -> tuple[Any, Any]:  # noqa: B006
    if kind not in made:
        folder = request.getfixturevalue("tmp_path_factory").mktemp(kind)
        theirs = request.getfixturevalue(f"{kind}_tokenizer")()
        theirs.save_pretrained(folder)
        made[kind] = TokenizerFile(folder), theirs
    return made[kind]


@pytest.mark.demo
def test_the_demo_models_tokenizer_reads_as_transformers_reads_it(demo_model: Path, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    from lamina.common.store import Store
    from lamina.models.checkpoints.source import resolve_source

    folder = resolve_source(demo_model, store=Store())
    ours, theirs = TokenizerFile(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=True) == theirs.encode(text)
    assert rendered(ours, None, MESSAGES[:2]) == rendered(theirs, None, MESSAGES[:2])


def test_what_only_transformers_can_do_is_left_to_it_and_said(
    bbpe_tokenizer: Any, tmp_path: Path, said: Any
) -> None:
    name = "fast_tokenizer_files"
    bbpe_tokenizer().save_pretrained(tmp_path)
    set_config(tmp_path, **{name: ["tokenizer.json"]})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("hello")
    assert [line for line in said() if "read by transformers" in line and name in line]


def test_reading_encoding_and_templates_import_no_transformers(bbpe_tokenizer: Any, tmp_path: Path) -> None:
    bbpe_tokenizer().save_pretrained(tmp_path)
    code = (
        "import sys; from pathlib import Path;"
        "from lamina.runtime.tokenization.tokenizer import load_tokenizer;"
        f"tokenizer = load_tokenizer(Path({str(tmp_path)!r}));"
        "ids = tokenizer.apply_chat_template([{'role': 'user', 'content': 'hi'}]);"
        "assert 'hi' in tokenizer.decode(ids); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("model_type, expected", [("mistral", 1), ("llama", 0)])
def test_a_mistral_tokenizer_with_the_expression_of_llama_3_is_said(
    bbpe_tokenizer: Any, tmp_path: Path, said: Any, model_type: str, expected: int
) -> None:
    bbpe_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    path.write_text(json.dumps(content))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert load_tokenizer(tmp_path) is not None
    assert len([line for line in said() if "fix_mistral_regex" in line]) == expected
    set_config(tmp_path, fix_mistral_regex=True)
    mended = load_tokenizer(tmp_path)
    assert mended is not None
    assert len([line for line in said() if "fix_mistral_regex" in line]) == expected
    cut = mended._backend._backend.pre_tokenizer.pre_tokenize_str("camelCase 123")
    words = ["camel", "Case", "Ġ", "1", "2", "3"] if expected else ["camelCase", "Ġ", "123"]
    assert [word for word, _ in cut] == words


@pytest.mark.parametrize("length", [LONG - 1, LONG, 10 * LONG])
@pytest.mark.parametrize("is_special", [False, True])
def test_a_long_text_has_the_ids_that_transformers_gives_it(
    tiny_text_folder: Path, length: int, is_special: bool
) -> None:
    text = ("héllo <s> 😀 " * length)[:length]
    from transformers import AutoTokenizer

    ours, theirs = TokenizerFile(tiny_text_folder), AutoTokenizer.from_pretrained(tiny_text_folder)
    assert ours.encode(text, add_special_tokens=is_special) == theirs.encode(
        text, add_special_tokens=is_special
    )


def test_others_go_on_while_a_long_text_is_read(tiny_text_folder: Path) -> None:
    tokenizer = TokenizerFile(tiny_text_folder)
    reading = threading.Thread(
        target=tokenizer.encode, args=("ab " * 400_000,), kwargs={"add_special_tokens": False}
    )
    reading.start()
    num_turns = 0
    while reading.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 10  # a thread that keeps the GIL leaves one or two


def test_it_is_said_where_tokens_have_other_ids_than_the_files_say(tmp_path, bbpe_tokenizer, caplog):
    tokenizer = bbpe_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.save_pretrained(tmp_path)
    own = {str(token_id): token for token_id, token in tokenizer.added_tokens_decoder.items()}
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    plain = {id_: {flag: getattr(token, flag) for flag in flags} for id_, token in own.items()}
    set_config(tmp_path, added_tokens_decoder=plain)
    TokenizerFile(tmp_path)
    assert not caplog.records
    call, called = map(tokenizer.convert_tokens_to_ids, ("<tool_call>", "</tool_call>"))
    moved = {id_: token for id_, token in plain.items() if id_ not in (str(call), str(called))}
    moved |= {"300": plain[str(call)], "303": plain[str(called)]}
    set_config(tmp_path, added_tokens_decoder=moved)
    TokenizerFile(tmp_path)
    (record,) = caplog.records
    assert "2 added tokens have other ids" in record.getMessage()
    assert f"'<tool_call>' has {call}, not 300" in record.getMessage()
