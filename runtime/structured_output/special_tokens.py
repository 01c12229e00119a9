"""Special tokens of a tokenizer for llguidance, apart from text that is written as they are."""

import json
import re
from collections.abc import Mapping
from typing import Any

# llguidance has the tokenizer cut text that a form leaves no choice of, and that takes special tokens out of
# text, which a grammar then refuses. By another name none is found there.
MARK = "\U0010fffd"
# A string, a regular expression or a comment of Lark's, in which nothing is a token; or one by its name.
LARK = re.compile(r'"(?:\\.|[^"\\])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/|(<[^<>\s\[\]]+>)')
# Of a normalizer, what would have text written otherwise than a form has it.
REWRITING = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents")


def renamed(tokenizer_json: str) -> tuple[str, dict[str, int]]:
    """Returns a tokenizer.json that cuts no text into special tokens, and their ids by their own names."""
    tokenizer: dict[str, Any] = json.loads(tokenizer_json)
    special = [token for token in tokenizer.get("added_tokens") or () if _is_special(token)]
    ids = {token["content"]: token["id"] for token in special}
    for token in special:
        token.update(content=MARK + token["content"], special=True)
    model = tokenizer["model"]
    model["vocab"] = _renamed_vocabulary(model["vocab"], ids)
    if model.get("unk_token") in ids:
        model["unk_token"] = MARK + model["unk_token"]
    tokenizer["post_processor"] = None  # which names special tokens, and adds none here
    tokenizer["normalizer"] = _faithful(tokenizer.get("normalizer"))
    return json.dumps(tokenizer), ids


def _is_special(token: Mapping[str, Any]) -> bool:
    """Whether llguidance takes an added token for a special one: those, too, that are written like one."""
    name: str = token["content"]
    return bool(token["special"]) or (name.startswith("<") and name.endswith(">"))


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
