"""Tokenizers by whose tokens grammars are walked: SmolLM2's out of its GGUF file, and one of 131,072."""

import base64
import json
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from schema_corpus import downloaded
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from lamina.models.checkpoints.gguf_file import read_gguf
from lamina.models.checkpoints.gguf_tokenizer import write_tokenizer

NUM_SPECIAL = 1000  # ids of Mistral's that are none of its vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """A tokenizer, and its token that ends answers."""

    name: str
    tokenizer: Tokenizer
    eos: int

    @property
    def size(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids))


def smollm2(model: Path, folder: Path) -> Vocabulary:
    """Returns the tokenizer of the file of a model."""
    with tempfile.TemporaryDirectory() as made:
        write_tokenizer(read_gguf(model), Path(made))
        tokenizer = Tokenizer.from_file(f"{made}/tokenizer.json")
    return Vocabulary(name="SmolLM2", tokenizer=tokenizer, eos=tokenizer.token_to_id("<|im_end|>"))


def tekken(model: Path, folder: Path) -> Vocabulary:
    """Returns Mistral's tokenizer of 131,072 tokens, out of its package."""
    made = folder / "tekken.json"
    if not made.exists():
        with zipfile.ZipFile(downloaded(folder, "mistral-common==1.13.1")) as wheel:
            found = json.loads(wheel.read("mistral_common/data/tekken_240911.json"))
        num = found["config"]["default_vocab_size"] - NUM_SPECIAL
        pieces = [base64.b64decode(each["token_bytes"]) for each in found["vocab"][:num]]
        _written(pieces, found["config"]["pattern"]).save(str(made))
    tokenizer = Tokenizer.from_file(str(made))
    return Vocabulary(name="Tekken", tokenizer=tokenizer, eos=tokenizer.token_to_id("</s>"))


def _written(pieces: Sequence[bytes], pattern: str) -> Tokenizer:
    """Returns byte-pair encoding by ranks, as tokenizers has it: by merges."""
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    chars = _bytes_as_chars()

    def shown(piece: bytes) -> str:
        return "".join(chars[byte] for byte in piece)

    merges = [tuple(map(shown, _halves(piece, ranks))) for piece in pieces if len(piece) > 1]
    vocabulary = {shown(piece): NUM_SPECIAL + rank for rank, piece in enumerate(pieces)}
    special = ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{number}>" for number in range(3, NUM_SPECIAL))]
    vocabulary |= {text: number for number, text in enumerate(special)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    splits = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def _halves(piece: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Returns the two tokens that a token is merged of: the last merge of all before its own."""
    parts = [piece[at : at + 1] for at in range(len(piece))]
    while len(parts) > 2:
        pairs = [ranks.get(parts[at] + parts[at + 1], len(ranks)) for at in range(len(parts) - 1)]
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _bytes_as_chars() -> dict[int, str]:
    """Returns the character by which tokenizers writes each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + at) for at, byte in enumerate(others)}


TOKENIZERS: dict[str, Callable[[Path, Path], Vocabulary]] = {"smollm2": smollm2, "tekken": tekken}
