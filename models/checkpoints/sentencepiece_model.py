"""SentencePiece's own file, tokenizer.model, as an object of the tokenizers library: the same ids."""

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ...common.errors import LoadError, UnsupportedError
from .character_map import check_character_map
from .gguf_vocabulary import CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from .sentencepiece_merges import SPACE, merges_by_score

UNUSED = 5  # further types are those of GGUF, which took them from here
UNIGRAM, BPE = 1, 2
KINDS = {3: "word", 4: "char"}
BYTE_PIECE = "<(?=0x[0-9A-F]{2}>)"  # such a text is no byte: it is cut behind its first letter
REMEDY = "name a folder with the same model's tokenizer.json with --tokenizer, in Python tokenizer="


@dataclass(frozen=True, kw_only=True, slots=True)
class SentencePieceModel:
    """What the file says, as far as ids depend on it; ids are places in `texts`."""

    texts: list[str]
    scores: list[float]
    types: list[int]
    kind: int = UNIGRAM
    has_byte_fallback: bool = False
    roles: Mapping[str, int] = field(default_factory=dict)  # ids of bos_token and so on
    character_map: bytes = b""  # how characters are replaced beforehand
    adds_prefix: bool = True  # a space before the text
    squeezes_spaces: bool = True  # none at the ends, one between words

    def of_type(self, *types: int) -> list[int]:
        """Ids of the pieces of these types."""
        return [token_id for token_id, kind in enumerate(self.types) if kind in types]


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """The file, checked; LoadError where it is none, UnsupportedError where it asks for what is not known."""
    try:
        model = _parsed(path.read_bytes())
    except (OSError, ValueError, IndexError, struct.error, TypeError, AttributeError) as error:
        raise LoadError(
            f"{path} cannot be read as a SentencePiece model: {error}; download it again, or {REMEDY}"
        ) from error
    if not model.texts or len(set(model.texts)) != len(model.texts):
        raise LoadError(f"{path} holds {len(model.texts)} pieces; wanted some, each once; download it again")
    if model.kind not in (UNIGRAM, BPE):
        kind = KINDS.get(model.kind, str(model.kind))
        raise UnsupportedError(f"{path}: model_type is {kind}; wanted unigram or bpe; {REMEDY}")
    unused = model.of_type(UNUSED)
    if unused:
        raise UnsupportedError(
            f"{path}: the piece {model.texts[unused[0]]!r:.80} is UNUSED, which is not known; {REMEDY}"
        )
    return model


def build_sentencepiece(model: SentencePieceModel, origin: Path) -> Tokenizer:
    """The tokenizer that makes the same ids of a text, and takes control pieces in it for what they are.

    One thing differs: of a BPE model a text that is one user-defined piece and nothing else gets no prefix.
    UnsupportedError where a user-defined piece is changed by what is done to a text beforehand, or, of a
    unigram model, weighed against others of blanks; LoadError where its map of characters is damaged.
    """
    is_bpe = model.kind == BPE
    tokenizer = Tokenizer(_bpe(model) if is_bpe else _unigram(model))
    own = [model.texts[token_id] for token_id in model.of_type(USER_DEFINED)]
    if model.character_map:
        check_character_map(model.character_map, origin)
    tokenizer.normalizer = _normalizer(model, own)
    changed = [
        text
        for text in own
        if tokenizer.normalizer.normalize_str(text) != text or (SPACE in text and not is_bpe)
    ]
    if changed:
        raise UnsupportedError(
            f"{origin}: the user-defined piece {changed[0]!r:.80} is changed by the file's own normalizer or "
            f"has a blank in a unigram model, of which ids are not known; {REMEDY}"
        )
    if not is_bpe:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(BYTE_PIECE), "merged_with_previous")
    special = [model.texts[token_id] for token_id in model.of_type(CONTROL, UNKNOWN)]
    tokenizer.add_tokens(
        [AddedToken(text, special=True, normalized=False) for text in special]
        + [AddedToken(text, normalized=True) for text in own if is_bpe]
    )
    strip = [decoders.Strip(" ", 1, 0)] if model.adds_prefix or model.squeezes_spaces else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _bpe(model: SentencePieceModel) -> models.BPE:
    ids = {text: token_id for token_id, text in enumerate(model.texts)}
    ordinary = {model.texts[token_id]: token_id for token_id in model.of_type(NORMAL, USER_DEFINED)}
    unknown = model.of_type(UNKNOWN)
    return models.BPE(
        ids,
        merges_by_score(ordinary, model.scores),
        unk_token=model.texts[unknown[0]] if unknown else None,
        byte_fallback=model.has_byte_fallback,
        fuse_unk=True,
    )


def _unigram(model: SentencePieceModel) -> models.Unigram:
    unknown = model.of_type(UNKNOWN)
    return models.Unigram(
        list(zip(model.texts, model.scores, strict=True)),
        unk_id=unknown[0] if unknown else None,
        byte_fallback=model.has_byte_fallback,
    )


def _normalizer(model: SentencePieceModel, own: list[str]) -> normalizers.Sequence:
    """What is done to a text beforehand, and by the library to user-defined pieces, which get no prefix."""
    alone = "|".join(map(re.escape, own)) or "(?!)"
    steps: list[normalizers.Normalizer] = []
    if model.character_map:
        steps.append(normalizers.Precompiled(model.character_map))
    if model.squeezes_spaces:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.adds_prefix:
        steps.append(normalizers.Replace(Regex(rf"\A(?!\z|(?:{alone})\z)"), SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    if model.squeezes_spaces:
        steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    return normalizers.Sequence(steps)


def _parsed(data: bytes) -> SentencePieceModel:
    """ModelProto: pieces are its field 1, the trainer's settings 2, the normalizer's 3."""
    texts, scores, types = [], [], []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(_bytes(value)))
            texts.append(_bytes(piece.get(1, b"")).decode("utf-8"))
            scores.append(struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0])
            types.append(int(piece.get(3, NORMAL)))
        elif number in (2, 3):
            (trainer if number == 2 else normalizer).update(_fields(_bytes(value)))
    if trainer.get(24) or not normalizer.get(5, 1):
        raise ValueError("spaces are suffixes, or not spelled as \\u2581, which is not known")
    named = {
        "unk_token": trainer.get(40, 0),
        "bos_token": trainer.get(41, 1),
        "eos_token": trainer.get(42, 2),
    }
    return SentencePieceModel(
        texts=texts,
        scores=scores,
        types=types,
        kind=int(trainer.get(3, UNIGRAM)),
        has_byte_fallback=bool(trainer.get(35)),
        roles={
            name: int(i)
            for name, i in named.items()
            if int(i) < len(texts) and types[int(i)] in (CONTROL, UNKNOWN)
        },
        character_map=_bytes(normalizer.get(2, b"")),
        adds_prefix=bool(normalizer.get(3, 1)),
        squeezes_spaces=bool(normalizer.get(4, 1)),
    )


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"a field is the number {value}; wanted bytes")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Fields of a protobuf message by their numbers: varints as numbers, all else as bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, place = _varint(data, place)
            yield number, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"at byte {place} there is a field of wire type {wire}; wanted 0, 1, 2 or 5")
        size, place = (8 if wire == 1 else 4, place) if wire != 2 else _varint(data, place)
        if place + size > len(data):
            raise ValueError(f"a field of {size} bytes at byte {place} is cut off at {len(data)}")
        yield number, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError(f"the number that ends at byte {place} has more than 64 bits")
