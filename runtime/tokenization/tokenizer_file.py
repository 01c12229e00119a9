"""A tokenizer read from its own files by the tokenizers library: no import of transformers, the same ids."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from ...common.logging import get_logger
from ...models.checkpoints import tekken
from ...models.checkpoints.character_map import check_normalizer
from ...models.checkpoints.sentencepiece_model import build_sentencepiece, read_sentencepiece
from ...models.fields import read_text, whole_file

logger = get_logger("runtime")
TOKENIZER_JSON, TEKKEN_JSON, SENTENCEPIECE_MODEL = "tokenizer.json", "tekken.json", "tokenizer.model"
# Classes whose ids are those of the file; those of others begin elsewhere.
SENTENCEPIECE_CLASSES = ("Llama", "CodeLlama", "Gemma", "Mistral", "PreTrained", "TokenizersBackend")
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MISTRALS = ("mistral", "mistral3", "ministral", "ministral3", "pixtral", "voxtral")
LLAMA3_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
LONG = 4096  # characters of a text that takes milliseconds
# What else a tokenizer_config.json may ask for that changes ids: rare, and left to transformers.
LEFT_TO_TRANSFORMERS = ("fast_tokenizer_files",)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
MISTRAL_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenizerFile:
    """What transformers' PreTrainedTokenizerFast makes of a folder, as far as serving asks.

    Raises ValueError or what the tokenizers library raises where a file is no tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        config = _read_object(folder / "tokenizer_config.json")
        self._backend, roles_of_file = _backend(folder, config)
        config = roles_of_file | config
        self.backend_tokenizer = self._backend  # as transformers calls it
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        roles, extra, added = _tokens(folder, config, self.added_tokens_decoder)
        self.special_tokens_map: dict[str, str] = {name: token.content for name, token in roles.items()}
        self._add(list(roles.values()), extra, added)
        self._warn_of_moved(folder, added)
        self.bos_token = self.special_tokens_map.get("bos_token")
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        if not os.path.lexists(folder / TOKENIZER_JSON):
            self._add_ends(bool(config.get("add_bos_token", True)), bool(config.get("add_eos_token", False)))
        self.chat_template: str | dict[str, str] | None = _chat_template(folder, config)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Tokens that are found in a text before its words are, by their ids."""
        return self._backend.get_added_tokens_decoder()

    @property
    def decoder(self) -> Any:
        """What joins tokens to a text."""
        return self._backend.decoder

    def get_vocab(self) -> dict[str, int]:
        """Every token with its id."""
        return self._backend.get_vocab(with_added_tokens=True)

    def encode(
        self, text: str, text_pair: str | None = None, *, add_special_tokens: bool, verbose: bool = False
    ) -> list[int]:
        """Token ids of a text, or of two as one; while a long one is read, other threads go on."""
        if len(text) < LONG:
            return list(self._backend.encode(text, text_pair, add_special_tokens=add_special_tokens).ids)
        # Of the two only this gives the GIL away, at the price of starting threads of its own.
        given = text if text_pair is None else (text, text_pair)
        (found,) = self._backend.encode_batch_fast([given], add_special_tokens=add_special_tokens)
        return list(found.ids)

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of token ids."""
        assert not clean_up_tokenization_spaces, "never wanted: it changes what the model wrote"
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        tokenize: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation; variables are what else its template reads."""
        from .chat_template import render  # jinja2, which plain prompts do not need

        assert not tokenize
        known = {"documents": None, **self.special_tokens_map, **variables}
        return render(
            chat_template or chosen(self.chat_template, tools is not None),
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **known,
        )

    def _add_ends(self, has_bos: bool, has_eos: bool) -> None:
        """Let texts begin with BOS and end with EOS; other files than tokenizer.json do not say so."""
        asked = {"bos_token": has_bos, "eos_token": has_eos}
        ids = {name: self._id_of(name) for name, is_asked in asked.items() if is_asked}
        texts = {
            name: (self.special_tokens_map[name], token_id)
            for name, token_id in ids.items()
            if token_id is not None
        }
        first, last = ([texts[name][0]] if name in texts else [] for name in ("bos_token", "eos_token"))
        if texts:
            self._backend.post_processor = processors.TemplateProcessing(
                single=[*first, "$A", *last],
                pair=[*first, "$A", *last, *(f"{text}:1" for text in first), "$B:1"],
                special_tokens=list(texts.values()),
            )

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _add(
        self, roles: Sequence[AddedToken], extra: Sequence[AddedToken], added: Mapping[int, AddedToken]
    ) -> None:
        """Tokens that the other files know and tokenizer.json does not, or knows otherwise."""
        known = self.added_tokens_decoder.values()
        kinds = {repr(token) for token in known}
        new = [token for _, token in sorted(added.items()) if repr(token) not in kinds]
        texts = {token.content for token in (*known, *new)}
        for token in (*roles, *extra):
            if token.content not in texts:
                texts.add(token.content)
                new.append(token)
        with_role = {token.content for token in roles}
        for token in new:
            token.special = token.special or token.content in with_role
        if new:
            self._backend.add_tokens(new)

    def _warn_of_moved(self, folder: Path, added: Mapping[int, AddedToken]) -> None:
        """Say which tokens have other ids here than in the files, as where there are gaps before them."""
        known = {token.content: token_id for token_id, token in self.added_tokens_decoder.items()}
        moved = [(token.content, id_) for id_, token in added.items() if known.get(token.content, id_) != id_]
        for text, id_ in moved[:1]:
            logger.warning(
                "%s: %d added tokens have other ids than tokenizer_config.json says, as with "
                "transformers: %r has %d, not %d",
                *(folder, len(moved), text, known[text], id_),
            )


def obstacle(folder: Path) -> str | None:
    """Why a folder's tokenizer is left to transformers, None where its files say everything."""
    config = _read_object(folder / "tokenizer_config.json")
    asked = [name for name in LEFT_TO_TRANSFORMERS if config.get(name)]
    if asked:
        return f"tokenizer_config.json has {', '.join(asked)}"
    if any(os.path.lexists(folder / name) for name in (TOKENIZER_JSON, TEKKEN_JSON)):
        return None
    if not os.path.lexists(folder / SENTENCEPIECE_MODEL):
        return f"there is no {TOKENIZER_JSON}"
    kind = config.get("tokenizer_class") or "Llama"
    if not str(kind).startswith(SENTENCEPIECE_CLASSES):
        return f"there is no {TOKENIZER_JSON}, and tokenizer_class is {kind!r:.80}"
    return None


def _backend(folder: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """What the folder's main file says, and its tokens by role where it names them."""
    path = folder / TOKENIZER_JSON
    if os.path.lexists(path):
        if config.get("fix_mistral_regex") and cuts_words_wrongly(folder):
            return tokenizers.Tokenizer.from_str(_with_words_of_mistral(path)), {}
        backend = tokenizers.Tokenizer.from_file(str(whole_file(path)))
        check_normalizer(backend, path)
        return backend, {}
    if os.path.lexists(folder / TEKKEN_JSON):
        backend = tekken.build_tekken(folder / TEKKEN_JSON)
        roles = {name: text for name, text in tekken.ROLES.items() if backend.token_to_id(text) is not None}
        return backend, roles
    path = whole_file(folder / SENTENCEPIECE_MODEL)
    model = read_sentencepiece(path)
    return build_sentencepiece(model, path), {name: model.texts[i] for name, i in model.roles.items()}


def cuts_words_wrongly(folder: Path) -> bool:
    """Whether a Mistral model has the expression of Llama 3, as tokenizer.json files were once converted."""
    if not os.path.lexists(folder / TOKENIZER_JSON):
        return False
    model = _read_object(folder / "config.json").get("model_type")
    if model not in MISTRALS:
        return False
    steps = json.dumps(_read_object(folder / TOKENIZER_JSON).get("pre_tokenizer"))
    return json.dumps(LLAMA3_WORDS)[1:-1] in steps


def warns_of_words(folder: Path) -> bool:
    """Whether words are cut wrongly, and nobody has decided on it by fix_mistral_regex."""
    is_decided = "fix_mistral_regex" in _read_object(folder / "tokenizer_config.json")
    return not is_decided and cuts_words_wrongly(folder)


def _with_words_of_mistral(path: Path) -> str:
    """The text of a tokenizer.json, with Mistral's expression in the place of Llama 3's."""
    content = _read_object(path)
    steps = content["pre_tokenizer"]
    for step in steps.get("pretokenizers", [steps]):
        pattern = step.get("pattern", {})
        if str(pattern.get("Regex", "")).startswith(LLAMA3_WORDS):
            pattern["Regex"] = MISTRAL_WORDS
    return json.dumps(content)


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object, empty where nothing lies there; LoadError for what is no file."""
    if not os.path.lexists(path):
        return {}
    found = json.loads(whole_file(path).read_bytes())
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds {found!r:.40}; wanted a JSON object")
    return found


def _tokens(
    folder: Path, config: dict[str, Any], known: Mapping[int, AddedToken]
) -> tuple[dict[str, AddedToken], list[AddedToken], dict[int, AddedToken]]:
    """Tokens by role, special ones without a role, and all by their ids, as the other files name them."""
    added: dict[int, AddedToken] = {}
    said = config
    if "added_tokens_decoder" in config:
        added = {int(number): _token(entry) for number, entry in config["added_tokens_decoder"].items()}
    else:  # as folders were written before: what is special stands in a file of its own
        said = config | _read_object(folder / "special_tokens_map.json")
        special = {token.content for token in (*_roles(said).values(), *_extra(said))}
        for text, number in _read_object(folder / "added_tokens.json").items():
            added[number] = AddedToken(text, normalized=text not in special, special=text in special)
        added |= known
    by_text = {token.content: token for token in added.values()}
    roles = {name: by_text.get(token.content, token) for name, token in _roles(said).items()}
    return roles, _extra(said), added


def _roles(said: Mapping[str, Any]) -> dict[str, AddedToken]:
    """bos_token, eos_token and so on, then those that only this model has; templates read them by name."""
    own = said.get("extra_special_tokens")
    roles = {**said, **own} if isinstance(own, dict) else said
    wrong = [name for name in NAMED if not isinstance(roles.get(name), (str, dict, NoneType))]
    if wrong:
        raise ValueError(f"{wrong[0]} is {roles[wrong[0]]!r:.40}; wanted a token")
    names = (*NAMED, *(name for name in roles if name.endswith("_token") and name not in NAMED))
    return {name: _token(roles[name]) for name in names if isinstance(roles.get(name), (str, dict))}


def _extra(said: Mapping[str, Any]) -> list[AddedToken]:
    lists = (said.get("extra_special_tokens"), said.get("additional_special_tokens"))
    return [_token(entry) for entries in lists if isinstance(entries, list) for entry in entries]


def _token(entry: str | Mapping[str, Any]) -> AddedToken:
    if isinstance(entry, str):
        return AddedToken(entry, special=True)
    return AddedToken(entry["content"], **{flag: entry[flag] for flag in FLAGS if flag in entry})


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The model's template, or several by name; a file of its own wins over tokenizer_config.json."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    there = {name: path for name, path in files.items() if os.path.lexists(path)}
    found = {name: read_text(path) for name, path in there.items()}
    if found:
        return found["default"] if list(found) == ["default"] else found
    given = config.get("chat_template")
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given}
    if not isinstance(given, (str, NoneType)):
        raise ValueError(f"chat_template is {given!r:.40}; wanted a text")
    return given


def chosen(template: str | Mapping[str, str] | None, has_tools: bool) -> str:
    """The template for a conversation, with tools or without."""
    if isinstance(template, str):
        return template
    templates = template or {}
    name = "tool_use" if has_tools and "tool_use" in templates else "default"
    if name not in templates:
        raise ValueError(f"there are templates for {sorted(templates)} and none that is the default")
    return templates[name]
