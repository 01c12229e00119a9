"""The tokenizer in a GGUF file's metadata, as the files of a tokenizer folder: llama.cpp's ids."""

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from ...common.errors import LoadError
from .gguf_vocabulary import BYTE_LEVEL, REMEDY, ROLES, USER_DEFINED, Vocabulary, read_vocabulary
from .sentencepiece_merges import SPACE, merges_by_score

if TYPE_CHECKING:
    from .gguf_file import GGUFFile

TOKENIZER_ERROR = "tokenizer_error.txt"  # why a converted folder has no tokenizer
TEMPLATE_NAME = re.compile(r"[\w-]+")


def has_tokenizer(file: "GGUFFile") -> bool:
    """Whether the file says anything of a tokenizer."""
    return "tokenizer.ggml.tokens" in file.metadata


def write_tokenizer(file: "GGUFFile", folder: Path) -> None:
    """Write tokenizer.json and what belongs to it; nothing where the file has no tokenizer.

    Raises LoadError where the metadata is damaged, UnsupportedError where it asks for what is not known, both
    naming the field.
    """
    if not has_tokenizer(file):
        return
    vocabulary = read_vocabulary(file)
    try:
        tokenizer = build_tokenizer(vocabulary)
    except Exception as error:  # the tokenizers library raises nothing more precise
        raise LoadError(
            f"the tokenizer of {file.path} cannot be read: {error}; download the file again, or {REMEDY}"
        ) from error
    text = tokenizer.to_str(pretty=True)  # save raises no OSError where the disk is full
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    check_tokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")), vocabulary)
    named = {f"{ROLES[role]}_token": vocabulary.texts[i] for role, i in vocabulary.roles.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_templates(file, folder)


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """The same as an object of the tokenizers library."""
    build = _byte_level if vocabulary.model == BYTE_LEVEL else _sentencepiece
    tokenizer = build(vocabulary, {text: token_id for token_id, text in enumerate(vocabulary.texts)})
    tokenizer.add_tokens([_added_token(vocabulary, token_id) for token_id in vocabulary.special_ids])
    first = [vocabulary.texts[vocabulary.roles["bos"]]] if vocabulary.add_bos else []
    last = [vocabulary.texts[vocabulary.roles["eos"]]] if vocabulary.add_eos else []
    steps: list[Any] = [processors.ByteLevel(trim_offsets=False)] if vocabulary.model == BYTE_LEVEL else []
    if first or last:
        ids = {text: vocabulary.texts.index(text) for text in (*first, *last)}
        steps.append(
            processors.TemplateProcessing(
                single=[*first, "$A", *last],
                pair=[*first, "$A", *last, *(f"{text}:1" for text in first), "$B:1"],
                special_tokens=list(ids.items()),
            )
        )
    if steps:
        tokenizer.post_processor = processors.Sequence(steps)
    return tokenizer


def _added_token(vocabulary: Vocabulary, token_id: int) -> AddedToken:
    text, is_special = vocabulary.texts[token_id], vocabulary.types[token_id] != USER_DEFINED
    strips = vocabulary.strips_after_control and text not in ("<unk>", "<s>", "<|endoftext|>")
    return AddedToken(text, special=is_special, normalized=False, rstrip=strips)


def _byte_level(vocabulary: Vocabulary, ids: Mapping[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(dict(ids), list(vocabulary.merges), ignore_merges=vocabulary.pre.ignore_merges)
    )
    cuts = [pre_tokenizers.Split(Regex(text), "isolated") for text in vocabulary.pre.expressions]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    tokenizer.decoder = decoders.Sequence([*_spelled_out(vocabulary), decoders.ByteLevel()])
    return tokenizer


def _spelled_out(vocabulary: Vocabulary) -> list[decoders.Replace]:
    """Special tokens whose text, such as one é, would be read for bytes as ordinary tokens spell them."""
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    texts = [vocabulary.texts[token_id] for token_id in vocabulary.special_ids]
    return [
        decoders.Replace(Regex(rf"\A{re.escape(text)}\z"), to_bytes.pre_tokenize_str(text)[0][0])
        for text in texts
        if not text.isascii() and set(text) <= alphabet
    ]


def _sentencepiece(vocabulary: Vocabulary, ids: Mapping[str, int]) -> Tokenizer:
    unknown = vocabulary.roles.get("unknown")
    tokenizer = Tokenizer(
        models.BPE(
            dict(ids),
            merges_by_score(ids, vocabulary.scores),
            unk_token=None if unknown is None else vocabulary.texts[unknown],
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    prefix = [normalizers.Prepend(SPACE)] if vocabulary.space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if vocabulary.space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """LoadError where a tokenizer is not what the file says: ids, types, roles, flags, order of merges."""
    found = tokenizer.get_vocab(with_added_tokens=True)
    special = tokenizer.get_added_tokens_decoder()
    empty = tokenizer.encode("", add_special_tokens=True).ids
    ends = [vocabulary.roles["bos"]] * vocabulary.add_bos, [vocabulary.roles["eos"]] * vocabulary.add_eos
    claims = {
        "ids of tokens": found == {text: token_id for token_id, text in enumerate(vocabulary.texts)},
        "special tokens": sorted(special) == vocabulary.special_ids,
        "types of tokens": all(
            token.special == (vocabulary.types[token_id] != USER_DEFINED)
            for token_id, token in special.items()
        ),
        "texts of special tokens": vocabulary.model != BYTE_LEVEL
        or all(
            tokenizer.decode([token_id], skip_special_tokens=False) == vocabulary.texts[token_id]
            for token_id in special
        ),
        "BOS and EOS": empty == [*ends[0], *ends[1]],
        "order of merges": _is_in_order(tokenizer, vocabulary),
    }
    wrong = [claim for claim, holds in claims.items() if not holds]
    if wrong:
        raise LoadError(
            f"the tokenizer of {vocabulary.origin} differs from what the file says, in {', '.join(wrong)}; "
            f"{REMEDY}"
        )


def _is_in_order(tokenizer: Tokenizer, vocabulary: Vocabulary) -> bool:
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    if vocabulary.model == BYTE_LEVEL:
        return merges == list(dict.fromkeys(vocabulary.merges))
    by_text = dict(zip(vocabulary.texts, vocabulary.scores, strict=True))
    scores = [by_text[left + right] for left, right in merges]
    return all(before >= after for before, after in itertools.pairwise(scores))


def _write_templates(file: "GGUFFile", folder: Path) -> None:
    """The chat template, and those under names of their own."""
    prefix = "tokenizer.chat_template"
    named = {
        name.removeprefix(f"{prefix}."): text
        for name, text in file.metadata.items()
        if name.startswith(f"{prefix}.")
    }
    default = file.metadata.get(prefix, named.pop("default", None))
    for name, text in {"default": default, **named}.items():
        if text is None:
            continue
        if not isinstance(text, str) or not TEMPLATE_NAME.fullmatch(name):
            raise LoadError(f"{file.path}: the chat template {name!r:.40} is {text!r:.40}; wanted a text")
        target = folder / "chat_template.jinja"
        if name != "default":
            target = folder / "additional_chat_templates" / f"{name}.jinja"
            target.parent.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8", newline="")
