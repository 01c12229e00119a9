"""Tokenizers of GGUF files: llama.cpp's ids for every name of a pre-tokenizer, and every flag of the file."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from lamina.common.errors import LaminaError, LoadError, UnsupportedError
from lamina.models.checkpoints.gguf_config import checkpoint_config
from lamina.models.checkpoints.gguf_file import GGUFFile, read_gguf
from lamina.models.checkpoints.gguf_pretokenizer import PRE_TOKENIZERS
from lamina.models.checkpoints.gguf_tokenizer import build_tokenizer, check_tokenizer, write_tokenizer
from lamina.models.checkpoints.gguf_vocabulary import end_token_ids, read_vocabulary
from lamina.runtime.tokenization.tokenizer import Tokenizer as ServedTokenizer
from lamina.runtime.tokenization.tokenizer import load_tokenizer

from ...conftest import DEMO_MODEL

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
# What llama.cpp makes of texts with the two vocabularies below.
EXPECTED = json.loads((Path(__file__).parent / "llama_cpp_ids.json").read_text())
NAME_OF_IDS = {name: kind for kind, names in EXPECTED["names"].items() for name in (kind, *names)}
VOCABULARIES = sorted((DEMO_MODEL.parent.parent / "vocabularies").glob("*.gguf.inp"))


def file_of(**metadata: Any) -> GGUFFile:
    """A file with this metadata, _ for . in names below tokenizer.ggml, and no weights."""
    fields = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    return GGUFFile(path=Path("model.gguf"), metadata=fields, tensors={})


def byte_level(texts: Sequence[str] = tuple(EXPECTED["texts"]), **changes: Any) -> GGUFFile:
    """All bytes and every pair of bytes in the texts: where a text is cut, its pair is not merged."""
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = [to_bytes.pre_tokenize_str(text)[0][0] for text in texts]
    pairs = sorted({text[i : i + 2] for text in spelled for i in range(len(text) - 1)})
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *pairs]
    tokens += ["ĠĠĠ", "ĠHTTPServer", "345", "don"]  # all but the first by no merge
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [CONTROL, CONTROL] + [NORMAL] * (len(tokens) - 2),
        "merges": [*(" ".join(pair) for pair in pairs), "ĠĠ Ġ"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return file_of(**metadata | changes)


def sentencepiece(**changes: Any) -> GGUFFile:
    """All bytes, letters, and some words whose scores are in no order."""
    words = [
        "▁hello",
        "▁world",
        "hello",
        "▁▁",
        "▁▁▁▁",
        "▁▁▁",
        "▁H",
        "He",
        "llo",
        "▁Hello",
        "Hel",
        "ll",
        "lo",
        "▁w",
        "or",
        "ld",
        "▁wor",
        "▁Hi",
        "Hi",
        "el",
        "he",
    ]
    letters = sorted(set("".join(words)) | set("Viatbcdx"))
    special = ["<|endoftext|>", "<|user|>", "<|end|>"]
    metadata = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words, *letters, *special],
        "token_type": [UNKNOWN, CONTROL, CONTROL]
        + [BYTE] * 256
        + [NORMAL] * (len(words) + len(letters))
        + [CONTROL, USER_DEFINED, CONTROL],
        "scores": [0.0] * 259
        + [-float(7 * i % len(words)) for i in range(len(words))]
        + [-100.0 - i for i in range(len(letters))]
        + [0.0] * 3,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return file_of(**metadata | changes)


def built(file: GGUFFile) -> Tokenizer:
    vocabulary = read_vocabulary(file)
    tokenizer = build_tokenizer(vocabulary)
    check_tokenizer(tokenizer, vocabulary)
    return tokenizer


def written(file: GGUFFile, folder: Path) -> ServedTokenizer:
    """As the runtime reads it from the converted folder."""
    write_tokenizer(file, folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_gives_llama_cpps_ids(name: str) -> None:
    tokenizer = built(byte_level(pre=name))
    found = [tokenizer.encode(text).ids for text in EXPECTED["texts"]]
    assert found == EXPECTED["ids"][NAME_OF_IDS[name]]


def test_a_file_without_a_pre_tokenizer_is_cut_as_by_default_and_this_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = byte_level()
    del file.metadata["tokenizer.ggml.pre"]
    assert [built(file).encode(text).ids for text in EXPECTED["texts"]] == EXPECTED["ids"]["default"]
    assert "does not say how its texts are cut" in caplog.text


@pytest.mark.parametrize("name", ["smol-lm", "gemma4", "Llama-BPE", "x" * 10_000])
def test_an_unknown_pre_tokenizer_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"which is not known; known are default, .*smollm") as caught:
        read_vocabulary(byte_level(pre=name))
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "settings, changes",
    [
        ("", {}),
        ("add_space_prefix=False", {"add_space_prefix": False}),
        ("add_bos_token=False, add_eos_token=True", {"add_bos_token": False, "add_eos_token": True}),
    ],
)
def test_sentencepiece_files_give_llama_cpps_ids(settings: str, changes: dict[str, Any]) -> None:
    tokenizer = built(sentencepiece(**changes))
    found = [tokenizer.encode(text).ids for text in EXPECTED["sentencepiece_texts"]]
    assert found == EXPECTED["sentencepiece"][settings]


def test_blanks_after_control_tokens_of_phi_3_are_dropped() -> None:
    file = sentencepiece()
    file.metadata["general.name"] = "Phi-3 mini"
    tokenizer = built(file)
    found = [tokenizer.encode(text).ids for text in EXPECTED["sentencepiece_texts"]]
    assert found == EXPECTED["sentencepiece"]["Phi-3"]


@pytest.mark.parametrize(
    "text, token_ids",
    [
        ("4 ½", [36, 216, 16738]),
        ("x  7", [104, 256, 39]),
        ("12345 2024", [33, 34, 35, 36, 37, 216, 34, 32, 34, 36]),
        ("I'll, HE'LL", [57, 3060, 28, 18209, 23, 16421]),
        ("a\n\n  b", [81, 8866, 278]),
        ("Cửa Việt", [51, 25275, 251, 81, 10506, 25275, 225, 100]),
        ("<|im_start|>user\nHi<|im_end|>", [1, 4093, 198, 26843, 2]),
    ],
)
def test_the_demo_model_reads_texts_as_llama_cpp_does(
    demo_tokenizer: Tokenizer, text: str, token_ids: list[int]
) -> None:
    assert demo_tokenizer.encode(text).ids == token_ids


@pytest.fixture(scope="module")
def demo_tokenizer() -> Tokenizer:
    return built(read_gguf(DEMO_MODEL))


@pytest.mark.skipif(not VOCABULARIES, reason="python tests/models/checkpoints/vocabularies.py fetches them")
@pytest.mark.parametrize("texts", VOCABULARIES, ids=lambda path: path.name)
def test_llama_cpps_own_vocabularies_give_its_ids(texts: Path) -> None:
    tokenizer = built(read_gguf(texts.with_suffix("")))
    expected = [line.split() for line in texts.with_suffix(".out").read_text().splitlines()]
    for text, token_ids in zip(
        texts.read_bytes().decode().split("\n__ggml_vocab_test__\n"), expected, strict=False
    ):
        assert tokenizer.encode(text, add_special_tokens=False).ids == [int(i) for i in token_ids], text


# Flags


@pytest.mark.parametrize("name", ["llama-bpe", "tekken", "chameleon"])
def test_bos_is_added_where_llama_cpp_adds_it_unasked_and_left_out_where_the_file_says_so(name: str) -> None:
    assert built(byte_level(pre=name)).encode("a").ids[0] == 0
    assert built(byte_level(pre=name, add_bos_token=False)).encode("a").ids[0] != 0
    assert built(byte_level(add_bos_token=True)).encode("a").ids[0] == 0


@pytest.mark.parametrize("role", ["bos", "eos"])
def test_a_token_to_be_added_that_is_not_named_is_refused(role: str) -> None:
    file = byte_level(**{f"add_{role}_token": True})
    del file.metadata[f"tokenizer.ggml.{role}_token_id"]
    with pytest.raises(LoadError, match=f"no tokenizer.ggml.{role}_token_id names one"):
        read_vocabulary(file)


def test_a_role_beyond_the_vocabulary_is_none_and_this_is_said(caplog: pytest.LogCaptureFixture) -> None:
    roles = read_vocabulary(byte_level(padding_token_id=2**32 - 1)).roles
    assert dict(roles) == {"bos": 0, "eos": 1}
    assert "tokenizer.ggml.padding_token_id is 4294967295; wanted an id below" in caplog.text


def test_types_roles_and_templates_reach_the_served_tokenizer(tmp_path: Path) -> None:
    file = sentencepiece()
    file.metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    file.metadata["tokenizer.chat_template.tool_use"] = "{{ tools[0].name }}{{ messages[0].content }}"
    tokenizer = written(file, tmp_path)
    texts = file.metadata["tokenizer.ggml.tokens"]
    control = {0, 1, 2, texts.index("<|endoftext|>"), texts.index("<|end|>")}
    assert set(tokenizer.special_tokens) == control
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    messages = [{"role": "user", "content": "hello"}]
    plain, with_tools = (
        tokenizer.apply_chat_template(messages, tools=t) for t in (None, [{"name": "world"}])
    )
    assert tokenizer.decode(plain, skip_special_tokens=False) == "<s> hello"
    assert tokenizer.decode(with_tools) == "worldhello"


def test_a_template_whose_name_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    file = byte_level()
    file.metadata["tokenizer.chat_template.../../x"] = "text"
    with pytest.raises(LoadError, match=r"the chat template '\.\./\.\./x' is 'text'"):
        write_tokenizer(file, tmp_path)


def test_a_special_token_that_looks_like_bytes_keeps_its_text() -> None:
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "éÉ", "ł", "x ", "÷"]
    file = byte_level(tokens=[*dict.fromkeys(tokens)], merges=[], token_type=None)
    kinds = {"<s>": CONTROL, "</s>": CONTROL, "éÉ": USER_DEFINED, "÷": USER_DEFINED, "x ": USER_DEFINED}
    file.metadata["tokenizer.ggml.token_type"] = [
        kinds.get(text, NORMAL) for text in file.metadata["tokenizer.ggml.tokens"]
    ]
    tokenizer = built(file)
    for text in ("éÉ", "÷", "x ", "aéÉ÷x b"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_what_ends_an_answer_is_known_by_its_text_though_the_file_calls_it_ordinary() -> None:
    file = byte_level()
    texts = [*file.metadata["tokenizer.ggml.tokens"], "<|im_end|>", "<|endoftext|>"]
    kinds = [*file.metadata["tokenizer.ggml.token_type"], NORMAL, CONTROL]
    file = byte_level(tokens=texts, token_type=kinds)
    assert end_token_ids(file) == [1, len(texts) - 2, len(texts) - 1]
    assert built(file).encode("a<|im_end|>").ids[-1] == len(texts) - 2


def test_the_demo_model_stops_at_every_token_that_ends_an_answer_for_llama_cpp() -> None:
    config = checkpoint_config(read_gguf(DEMO_MODEL), dtype())
    assert config["eos_token_id"] == [2, 0, 4]  # <|im_end|>, <|endoftext|>, <reponame>


@pytest.mark.parametrize(
    "more, ends",
    [
        (
            ["<|fim_pad|>", "<PAD>", "<|repo_name|>", "<|file_sep|>"],
            ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],
        ),
        (["<|end|>", "<|return|>"], ["<|end|>", "<|return|>"]),
        (["<|end|>", "<|return|>", "<|call|>"], ["<|return|>", "<|call|>"]),
        (["<|end|>", "<|calls|>", "<|flush|>"], ["<|calls|>", "<|flush|>"]),
        (["<|tool_response>", "<turn|>"], ["<|tool_response>", "<turn|>"]),
        (["[EOS]", "[EOT]", "[PAD]"], ["[EOS]", "[EOT]", "[PAD]"]),
        (["<|fim_prefix|>", "<fim_suffix>", "<MID>"], []),
    ],
    ids=str,
)
def test_end_tokens_are_those_of_llama_cpp(more: list[str], ends: list[str]) -> None:
    texts = [*byte_level().metadata["tokenizer.ggml.tokens"], *more]
    own = texts[1]
    file = byte_level(tokens=texts, token_type=None)
    has_response = "<|tool_response>" in more
    assert own == "</s>"
    assert [texts[i] for i in end_token_ids(file)] == [*([] if has_response else [own]), *ends]
    for text in more:
        is_inside = text == "<|end|>" and len(more) == 3
        assert (len(built(file).encode(text, add_special_tokens=False)) == 1) != is_inside


def test_fill_tokens_that_the_file_names_win_and_ids_beyond_the_vocabulary_are_none() -> None:
    texts = [*byte_level().metadata["tokenizer.ggml.tokens"], "<|fim_pad|>", "mine"]
    file = byte_level(tokens=texts, token_type=None, fim_pad_token_id=len(texts) - 1, eos_token_id=2**32 - 1)
    file.metadata["tokenizer.ggml.eot_token_id"] = len(texts)
    assert [texts[i] for i in end_token_ids(file)] == ["</s>", "mine"]


def dtype() -> Any:
    import torch

    return torch.float32


# Damaged and odd files


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": "abc"}, "cannot be read: tokenizer.ggml.tokens is 'abc'; wanted a list of str"),
        ({"tokens": ["a", "b", "a"]}, "tokens has 'a' twice"),
        ({"tokens": [1, 2]}, "tokens is 2 values; wanted a list of str"),
        ({"token_type": [1]}, r"token_type is 1 values; wanted a list of \d+ int"),
        ({"token_type": ["x"] * 1000}, "token_type is 1000 values"),
        ({"merges": ["ab"]}, "merges has 'ab'; wanted two tokens"),
        ({"merges": ["nope nope"]}, "cannot be read: .*out of vocabulary"),
        ({"merges": None}, "merges is None; wanted a list of str"),
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'; wanted gpt2 or llama"),
        ({"model": 7}, "tokenizer.ggml.model is 7; wanted a string"),
        ({"pre": 7}, "tokenizer.ggml.pre is 7; wanted a string"),
        ({"add_bos_token": 1}, "add_bos_token is 1; wanted true or false"),
    ],
    ids=str,
)
def test_damaged_metadata_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LaminaError, match=message):
        write_tokenizer(byte_level(**changes), tmp_path)


@given(
    scores=st.permutations([-float(i) for i in range(6)]),
    text=st.text("ab ", max_size=12),
    prefix=st.booleans(),
)
def test_merges_follow_the_scores_whatever_their_order(scores: list[float], text: str, prefix: bool) -> None:
    words = ["ab", "ba", "aa", "▁a", "aba", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", *words]
    file = file_of(
        model="llama",
        tokens=tokens,
        token_type=[UNKNOWN, CONTROL, CONTROL] + [NORMAL] * 9,
        scores=[0.0] * 3 + [-50.0, -51.0, -52.0, *scores],
        add_bos_token=False,
        add_space_prefix=prefix,
    )
    spelled = (" " * (prefix and text != "") + text).replace(" ", "▁")
    by_text = dict(zip(words, scores, strict=True))
    assert built(file).encode(text).tokens == merged(list(spelled), by_text)


def merged(pieces: list[str], scores: dict[str, float]) -> list[str]:
    """The definition: the neighbours of the best score become one, of equals the first, until none can."""
    while True:
        pairs = [
            (scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in scores
        ]
        if not pairs:
            return pieces
        place = -max(pairs)[1]
        pieces[place : place + 2] = ["".join(pieces[place : place + 2])]
