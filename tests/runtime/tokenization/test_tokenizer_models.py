"""Folders with SentencePiece's or Mistral's own file alone: the ids of those libraries, or what is wrong."""

import base64
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from lamina.common.errors import LaminaError, LoadError, UnsupportedError
from lamina.models.checkpoints.sentencepiece_model import build_sentencepiece, read_sentencepiece
from lamina.models.checkpoints.tekken import FIRST_SPECIAL
from lamina.runtime.tokenization.tokenizer import Tokenizer, load_tokenizer

# Ids that sentencepiece 0.2.3 gives to some texts, with the models that it made for this.
IDS = json.loads((Path(__file__).parent / "sentencepiece_ids.json").read_text())
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = (b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b"ld", "\u00e9".encode(), b"\xf0\x9f")


def write_model(folder: Path, name: str) -> Path:
    path = folder / "tokenizer.model"
    path.write_bytes(base64.b64decode(IDS[name]["model"]))
    return path


def loaded(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def write_tekken(folder: Path, **changes: Any) -> Path:
    tokens = [bytes([byte]) for byte in range(256)] + list(WORDS)
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    config = {
        "pattern": PATTERN,
        "default_vocab_size": 306,
        "default_num_special_tokens": 40,
        "version": "v3",
    }
    path = folder / "tekken.json"
    path.write_text(json.dumps({"config": config, "vocab": [*vocab, *vocab[:50]], **changes}))
    return path


@pytest.mark.parametrize("name", IDS)
def test_ids_are_those_of_sentencepiece(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, name)
    tokenizer = loaded(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    for text, ids in IDS[name]["ids"]:
        assert tokenizer.encode(text) == [1, *ids], text
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


def test_config_says_which_ends_a_text_gets_and_adds_tokens_and_a_template(tmp_path: Path) -> None:
    write_model(tmp_path, "bpe")
    size = loaded(tmp_path).size
    added = {str(size): {"content": "<|im_end|>", "special": True}}
    config = {"add_bos_token": False, "add_eos_token": True, "eos_token": "<|im_end|>"}
    config |= {"added_tokens_decoder": added, "chat_template": "{{ messages[0].content }}<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = loaded(tmp_path)
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [*plain, size]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}]) == [*plain, size]


def test_control_pieces_in_a_text_are_those_tokens(tmp_path: Path) -> None:
    write_model(tmp_path, "bpe")
    tokenizer = loaded(tmp_path)
    hello = tokenizer.encode("hello", add_special_tokens=False)
    marks = {text: token_id for token_id, text in tokenizer.special_tokens.items()}
    assert tokenizer.encode("<s>[INST]hello</s>") == [1, marks["[INST]"], *hello, 2]
    assert tokenizer.decode([1, *hello, 2]) == "hello"


@settings(deadline=None, max_examples=50)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=40))
def test_with_bytes_every_text_comes_back(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write_model(tmp_path_factory.getbasetemp(), "bpe")
    tokenizer = build_sentencepiece(read_sentencepiece(path), path)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_no_import_of_transformers_is_needed(tmp_path: Path) -> None:
    write_model(tmp_path, "unigram")
    code = (
        "import sys; from pathlib import Path;"
        "from lamina.runtime.tokenization.tokenizer import load_tokenizer; "
        f"load_tokenizer(Path({str(tmp_path)!r})).encode('hi'); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_a_damaged_model_is_an_error_that_names_the_file(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_model(tmp_path_factory.getbasetemp(), "bpe without bytes")
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] = data.draw(st.integers(0, 255))
    else:
        del content[place:]
    path.write_bytes(content)
    try:
        tokenizer = build_sentencepiece(read_sentencepiece(path), path)
        tokenizer.encode("hello")
    except LaminaError as error:
        said = str(error)
    else:
        said = str(path)
    assert str(path) in said


def test_word_models_and_other_classes_are_refused_by_name(tmp_path: Path) -> None:
    path = write_model(tmp_path, "bpe without bytes")
    model = path.read_bytes()
    assert model.count(b"\x18\x02 \xfa\x01") == 1  # model_type, then vocab_size
    path.write_bytes(model.replace(b"\x18\x02 \xfa\x01", b"\x18\x03 \xfa\x01"))
    with pytest.raises(UnsupportedError, match=r"model_type is word; wanted unigram or bpe; .*tokenizer="):
        load_tokenizer(tmp_path)


def test_a_user_defined_piece_of_blanks_is_refused_where_blanks_are_squeezed(tmp_path: Path) -> None:
    model = read_sentencepiece(write_model(tmp_path, "bpe"))
    squeezing = {name: getattr(model, name) for name in model.__slots__} | {"squeezes_spaces": True}
    with pytest.raises(UnsupportedError, match="user-defined piece '\u2581\u2581' is changed"):
        build_sentencepiece(type(model)(**squeezing), tmp_path)


def by_rank(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Tiktoken's rule: of neighbours, those are merged that make the token of the lowest rank."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        made = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not made:
            return [ranks[part] for part in parts]
        _, place = min(made)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@pytest.mark.parametrize(
    "text", ["hello world", "hellhe w\u00e9 \U0001f600 12", "", " ", "a\n\n b", "or wor"]
)
def test_ids_of_tekken_are_ranks_behind_the_special_tokens(tmp_path: Path, text: str) -> None:
    write_tekken(tmp_path)
    ranks = {token: i for i, token in enumerate([bytes([b]) for b in range(256)] + list(WORDS))}
    tokenizer = loaded(tmp_path)
    pieces = [word for word, _ in pre_tokenizers.Split(Regex(PATTERN), "isolated").pre_tokenize_str(text)]
    expected = [40 + rank for piece in pieces for rank in by_rank(piece.encode(), ranks)]
    assert tokenizer.encode(text) == [1, *expected]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_of_tekken(tmp_path: Path) -> None:
    write_tekken(tmp_path)
    tokenizer = loaded(tmp_path)
    assert [tokenizer.special_tokens[i] for i in range(20)] == list(FIRST_SPECIAL)
    assert (tokenizer.special_tokens[39], tokenizer.size) == ("<SPECIAL_39>", 306)
    assert tokenizer.encode("<s>[INST]hello[/INST]") == [1, 3, 40 + 256 + 3, 4]
    named = [{"rank": 1, "token_str": "</s>", "is_control": True}, {"rank": 0, "token_str": "<s>"}]
    write_tekken(tmp_path, special_tokens=named)
    assert (loaded(tmp_path).bos_token_id, loaded(tmp_path).eos_token_ids) == (0, (1,))


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab": None},
        {"vocab": [{"rank": 0, "token_bytes": "AA=="}]},
        {"vocab": [{"rank": 0, "token_bytes": "?"}]},
        {"config": {"pattern": 3}},
        {"config": {"pattern": "("}},
        {"config": []},
        {"special_tokens": [{"rank": 5, "token_str": "<s>"}]},
        {"special_tokens": 3},
    ],
)
def test_a_damaged_tekken_is_an_error_that_names_the_file(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_tekken(tmp_path, **changes)
    with pytest.raises(LaminaError, match=r"tekken\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer.model", "tekken.json", "tokenizer_config.json"]
)
def test_what_lies_in_the_place_of_a_file_is_called_what_it_is(tmp_path: Path, name: str) -> None:
    if name == "tokenizer_config.json":
        write_model(tmp_path, "bpe")
    path = tmp_path / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(LoadError, match=rf"{name} is a pointer of git-lfs .*run `git lfs pull`"):
        load_tokenizer(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(LoadError, match=rf"{name} is a folder; wanted a file"):
        load_tokenizer(tmp_path)
    path.rmdir()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(LoadError, match=rf"{name} is a link to .*nowhere, which does not exist"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", IDS)
def test_the_text_of_one_token_keeps_its_space(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path, name)
    tokenizer, model = loaded(tmp_path), read_sentencepiece(path)
    for token_id in model.of_type(1, 4):
        assert tokenizer.text_of(token_id) == model.texts[token_id].replace("\u2581", " ")
    assert tokenizer.text_of(2) == "</s>"
    halves = [token_id for text, token_id in tokenizer._backend.get_vocab().items() if text == "<0xE2>"]
    assert [tokenizer.text_of(token_id) for token_id in halves] == ["\ufffd"] * len(halves)


def test_the_text_of_one_token_of_other_tokenizers_is_its_text(
    bbpe_tokenizer: Any, spm_tokenizer: Any
) -> None:
    for make in (bbpe_tokenizer, spm_tokenizer):
        tokenizer = Tokenizer(make())
        ids = tokenizer.encode("hello the hello", add_special_tokens=False)
        assert "".join(map(tokenizer.text_of, ids)).strip() == "hello the hello"
