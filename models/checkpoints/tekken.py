"""Mistral's own file, tekken.json, as an object of the tokenizers library: bytes merged by their ranks."""

import base64
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from ...common.errors import LoadError
from ..fields import Fields, read_json

ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# Special tokens of files that name none, in the order of their ids.
FIRST_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def build_tekken(path: Path) -> Tokenizer:
    """The file's tokenizer: special tokens have the first ids, then come the tokens of bytes by rank.

    LoadError where the file is none or is damaged.
    """
    content = read_json(path)
    fields = Fields(content, str(path))
    settings = Fields(fields.object("config"), f"{path}: config")
    try:
        special = _special(content.get("special_tokens"), settings)
        count = settings.integer("default_vocab_size", len(special) + len(content["vocab"])) - len(special)
        ranked = [base64.b64decode(entry["token_bytes"], validate=True) for entry in content["vocab"][:count]]
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError(f"{path} cannot be read as a tokenizer: {error!r}; download it again") from error
    missing = {bytes([byte]) for byte in range(256)} - set(ranked)
    if missing or len(set(ranked)) != len(ranked):
        raise LoadError(f"{path}: vocab lacks bytes or has tokens twice; download it again")
    tokenizer = Tokenizer(_byte_pairs(ranked, special))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(settings.text("pattern")), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def _special(entries: Any, settings: Fields) -> list[str]:
    """Texts of special tokens by their ids, filled up to as many as there are said to be."""
    named = list(FIRST_SPECIAL)
    if entries is not None:
        named = [entry["token_str"] for entry in sorted(entries, key=lambda entry: entry["rank"])]
        if sorted(entry["rank"] for entry in entries) != list(range(len(entries))):
            raise ValueError("special_tokens have ranks with gaps; wanted 0 and so on")
    count = settings.integer("default_num_special_tokens", len(named))
    return named[:count] + [f"<SPECIAL_{token_id}>" for token_id in range(len(named), count)]


def _byte_pairs(ranked: list[bytes], special: list[str]) -> models.BPE:
    """Every pair of tokens that makes a token, in the order of what they make."""
    alphabet = _letters()
    ranks = {token: rank for rank, token in enumerate(ranked)}

    def spelled(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    vocabulary = {spelled(token): len(special) + rank for token, rank in ranks.items()}
    vocabulary |= {text: token_id for token_id, text in enumerate(special)}
    merges = []
    for token in ranked:
        pairs = [(token[:place], token[place:]) for place in range(1, len(token))]
        known = [(ranks[a], ranks[b], a, b) for a, b in pairs if a in ranks and b in ranks]
        merges += [(spelled(a), spelled(b)) for *_, a, b in sorted(known)]
    return models.BPE(vocabulary, merges, ignore_merges=True)


def _letters() -> list[str]:
    """The character that stands for each byte: itself where it can be seen, else one from U+0100 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(hidden)) for byte in range(256)]
