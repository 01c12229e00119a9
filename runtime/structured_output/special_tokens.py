"""Structural tokens of a tokenizer for llguidance, apart from text that is written as they are."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...common.structural_tokens import is_structural
from ...models.checkpoints.sentencepiece_merges import SPACE

# llguidance has the tokenizer cut text that a form leaves no choice of, and that takes special tokens out of
# text, which a grammar then refuses. By another name none is found there.
MARK = "\U0010fffd"
# Where a vocabulary writes blanks as U+2581, that character in a text would be cut into blanks: they are
# written as another character, and its bytes are tokens as those of any that the vocabulary lacks.
BLANK = "\U0010fffc"
# A string, a regular expression or a comment of Lark's, in which nothing is a token; or one by its name.
LARK = re.compile(r'"(?:\\.|[^"\\])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/|(<[^<>\s\[\]]+>)')
# Of a normalizer, what would have text written otherwise than a form has it.
REWRITING = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents")

Token = dict[str, Any]  # an added token of a tokenizer.json


def renamed(tokenizer_json: str, num_ids: int) -> tuple[str, dict[str, int]]:
    """Returns a tokenizer.json that cuts no text into structural tokens, and their ids by their own names.

    num_ids: ids from there on are no tokens of the model, and are left out.
    """
    tokenizer: dict[str, Any] = json.loads(tokenizer_json)
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    kept: list[Token] = [token for token in added if token["id"] < num_ids]
    structural = [token for token in kept if is_structural(token["content"], is_special=token["special"])]
    ids = {token["content"]: token["id"] for token in structural}
    model["vocab"] = _renamed_vocabulary(model["vocab"], ids)
    for token in structural:
        token.update(content=MARK + token["content"], special=True)
    if isinstance(model["vocab"], dict):
        for token in added:
            if token["id"] >= num_ids:
                model["vocab"].pop(token["content"], None)
        kept = _known(model["vocab"], kept)
    tokenizer["added_tokens"] = kept
    if model.get("unk_token") in ids:
        model["unk_token"] = MARK + model["unk_token"]
    tokenizer["post_processor"] = None  # which names special tokens, and adds none here
    tokenizer["normalizer"] = _faithful(tokenizer.get("normalizer"))
    text = json.dumps(tokenizer, ensure_ascii=False)
    return text.replace(SPACE, BLANK) if _has_blanks_as_space(tokenizer.get("decoder")) else text, ids


def _known(vocabulary: dict[str, int], added: Iterable[Token]) -> list[Token]:
    """Adds tokens to a vocabulary, and one for each id that has none; returns those that are still added.

    llguidance counts tokens to know the last id, and loads those that a vocabulary lacks by counting on. What
    it takes for special by its spelling, and is text, is one of the vocabulary alone.
    """
    texts = {token["content"]: token for token in added}
    vocabulary |= {content: token["id"] for content, token in texts.items()}
    unused = {*range(max(vocabulary.values(), default=-1))} - {*vocabulary.values()}
    names = {f"{MARK}<unused {id_}>": id_ for id_ in sorted(unused)}
    vocabulary |= names
    kept = [token for token in texts.values() if token["special"] or not _looks_special(token["content"])]
    return sorted([*kept, *map(_unused, names, names.values())], key=lambda token: int(token["id"]))


def _has_blanks_as_space(decoder: Any) -> bool:
    """Whether a decoder has a blank for each U+2581."""
    steps = (decoder or {}).get("decoders", [decoder or {}])
    return any(
        step.get("replacement") == SPACE
        or (step.get("pattern"), step.get("content")) == ({"String": SPACE}, " ")
        for step in steps
    )


def _looks_special(content: str) -> bool:
    """Whether llguidance takes a token for a special one by its spelling."""
    return content.isascii() and content.startswith("<") and content.endswith(">")


def _unused(name: str, id_: int) -> Token:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id_, "content": name, "special": True, **plain}


def _faithful(normalizer: Any) -> Any:
    """A normalizer without what changes the characters of a text, but for how blanks are spelled."""
    if normalizer is None or normalizer["type"] in REWRITING:
        return None
    if normalizer["type"] != "Sequence":
        return normalizer
    kept = [own for each in normalizer["normalizers"] if (own := _faithful(each)) is not None]
    return {**normalizer, "normalizers": kept} if kept else None


def _renamed_vocabulary(vocabulary: Any, ids: Mapping[str, int]) -> Any:
    """A vocabulary is a mapping, or pairs of a piece and its score."""
    if isinstance(vocabulary, dict):
        return {MARK + name if name in ids else name: id_ for name, id_ in vocabulary.items()}
    return [[MARK + name if name in ids else name, score] for name, score in vocabulary]


def in_lark(pieces: Iterable[str | int]) -> str:
    """Returns texts and ids of tokens in Lark's notation; empty for none."""
    return " ".join(f"<[{piece}]>" if isinstance(piece, int) else quoted(piece) for piece in pieces)


def quoted(text: str) -> str:
    """Returns a text as Lark and JSON write it, but for characters that are themselves."""
    return json.dumps(text, ensure_ascii=False)


def by_ids(grammar: str, ids: Mapping[str, int]) -> str:
    """Returns a grammar whose rules in Lark's notation name special tokens by their ids."""
    if not grammar.startswith("{"):
        return _lark_by_ids(grammar, ids)
    if "<" not in grammar:
        return grammar
    held = json.loads(grammar)
    for one in held["grammars"]:
        if one.get("lark_grammar") is not None:
            one["lark_grammar"] = _lark_by_ids(one["lark_grammar"], ids)
    return json.dumps(held)


def _lark_by_ids(lark: str, ids: Mapping[str, int]) -> str:
    def by_id(found: re.Match[str]) -> str:
        return f"<[{ids[found[1]]}]>" if found[1] in ids else found[0]

    return LARK.sub(by_id, lark)
