"""A damaged map of characters is refused at load: at a later text the tokenizers library would panic."""

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers

from lamina.common.errors import LoadError
from lamina.models.checkpoints.character_map import check_character_map
from lamina.models.checkpoints.sentencepiece_model import read_sentencepiece
from lamina.runtime.tokenization.tokenizer import load_tokenizer

IDS = json.loads((Path(__file__).parents[2] / "runtime/tokenization/sentencepiece_ids.json").read_text())


@pytest.fixture(scope="module")
def character_map(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("map") / "tokenizer.model"
    path.write_bytes(base64.b64decode(IDS["unigram"]["model"]))
    return read_sentencepiece(path).character_map


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_what_passes_is_followed_without_a_panic(data: st.DataObject, character_map: bytes) -> None:
    content = bytearray(character_map)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    if refused(bytes(content)):
        return
    normalizer = normalizers.Precompiled(bytes(content))
    for text in ("\ufb01ne", "\u2460\u2461", data.draw(st.text(st.characters(exclude_categories=["Cs"])))):
        normalizer.normalize_str(text)


def refused(content: bytes) -> bool:
    try:
        check_character_map(content, "a file")
    except LoadError:
        return True
    return False


def test_in_a_tokenizer_json_too(tmp_path: Path, character_map: bytes) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Precompiled(character_map), normalizers.NFC()])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    assert load_tokenizer(tmp_path) is not None
    good = base64.b64encode(character_map).decode()
    first_unit = (900 << 10).to_bytes(4, "little")  # the keys' first bytes would be looked up outside
    bad = base64.b64encode(character_map[:4] + first_unit + character_map[8:]).decode()
    content = path.read_text()
    assert good in content
    path.write_text(content.replace(good, bad))
    with pytest.raises(LoadError, match=r"tokenizer\.json.* a key leads to unit \d+ of 256"):
        load_tokenizer(tmp_path)
