"""Text to token ids and back, chat templates included: by the tokenizers library, or by transformers."""

import copy
import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ...common.errors import (
    ConfigError,
    LaminaError,
    LoadError,
    PromptTooLongError,
    RequestError,
    UnsupportedError,
    clipped,
    shown,
)
from ...common.logging import get_logger
from ...common.memory_errors import is_out_of_memory
from ...common.structural_tokens import StructuralTokens, is_structural
from ...models.checkpoints.gguf_tokenizer import TOKENIZER_ERROR
from ...models.checkpoints.sentencepiece_merges import SPACE
from ..validation import check_flag, check_unicode
from .byte_pieces import REPLACEMENT, bytes_of_piece
from .chat_messages import Messages, check_messages, check_template_kwargs, marked, readable, until_mark
from .plain_tokens import PlainTokens
from .tokenizer_file import (
    SENTENCEPIECE_MODEL,
    TEKKEN_JSON,
    TOKENIZER_JSON,
    TokenizerFile,
    chosen,
    obstacle,
    warns_of_words,
)

logger = get_logger("runtime")
TOKENIZER_FILES = (TOKENIZER_JSON, TEKKEN_JSON, SENTENCEPIECE_MODEL, "vocab.json")
CHARS_PER_TOKEN = 8  # seldom as many: a text that is longer is looked at in part before as a whole
MARGIN = 1024  # tokens that a cut may add, through words and runs of spaces
JSON_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json")


class Tokenizer:
    """One tokenizer, never changed: what it does to a text depends on that text alone."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.bos_token_id: int | None = backend.bos_token_id
        self.eos_token_ids: tuple[int, ...] = () if backend.eos_token_id is None else (backend.eos_token_id,)
        vocabulary = backend.get_vocab()
        self.size: int = max(vocabulary.values(), default=-1) + 1
        self.special_tokens: dict[int, str] = {
            token_id: token.content
            for token_id, token in backend.added_tokens_decoder.items()
            if token.special
        }
        self.byte_token_ids: dict[int, int] = self._byte_tokens(vocabulary)
        self._before: list[int] = self._word_before(vocabulary)
        self.plain_tokens = PlainTokens(self, getattr(backend, "decoder", None))
        self._texts: dict[int, str] = {}  # of single tokens, once asked for

    def encode(
        self,
        text: str,
        add_special_tokens: bool | None = None,
        max_tokens: int | None = None,
        pair: str | None = None,
    ) -> list[int]:
        """Returns the token ids of a text; RequestError soon where they are far more than max_tokens.

        By default the tokenizer's own special tokens are added, except to a text that already begins with the
        BOS string, as every rendered chat template does: that one has all it needs. pair: another text, which
        the tokenizer puts behind the first in its own way.
        """
        text = _plain(text)
        if add_special_tokens is None:
            bos = self._backend.bos_token
            add_special_tokens = not (bos and text.startswith(bos))
        texts = (text,) if pair is None else (text, _plain(pair))
        for each in texts:
            check_unicode("the prompt", each)
            if max_tokens is not None:
                self._refuse_longer(each, max_tokens)
        ids: list[int] = self._backend.encode(*texts, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    def encode_beginning(
        self, text: str, most: int, add_special_tokens: bool = True, pair: str | None = None
    ) -> list[int]:
        """Returns the token ids of a text or a pair, at most so many, the special ones kept.

        Of a pair it is the second text that is cut.
        """
        ids = self.encode(text, add_special_tokens, pair=pair)
        if len(ids) <= most:
            return ids
        plain = self.encode(text if pair is None else pair, add_special_tokens=False)
        start = _last_place(ids, plain)
        kept = max(0, len(plain) - (len(ids) - most))
        if start is None or not kept:
            return ids[:most]
        return ids[: start + kept] + ids[start + len(plain) :]

    def _refuse_longer(self, text: str, max_tokens: int) -> None:
        """Raises RequestError for a text whose beginning alone is too long: a whole book would take minutes.

        Nothing is concluded from the number of characters, since a token may stand for any number of them.
        """
        size = CHARS_PER_TOKEN * (max_tokens + MARGIN)
        while size < len(text):
            beginning: list[int] = self._backend.encode(text[:size], add_special_tokens=False, verbose=False)
            if len(beginning) > max_tokens + MARGIN:
                raise PromptTooLongError(
                    f"the prompt has {len(text)} characters, of which the first {size} are {len(beginning)} "
                    f"tokens, but there is room for at most {max_tokens}; shorten the prompt or raise "
                    "max_model_len"
                )
            size *= 4

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids, with spaces as the model wrote them; unknown ids have none."""
        text: str = self._backend.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def names_of(self, token_ids: Sequence[int]) -> list[str | None]:
        """Returns tokens as the vocabulary spells them; ids that it does not have are None."""
        return [self._names.get(token_id) for token_id in token_ids]

    @cached_property
    def structural_tokens(self) -> StructuralTokens:
        """The added tokens that stand for structure, and are no text."""
        return StructuralTokens(
            {
                token.content: token_id
                for token_id, token in self._backend.added_tokens_decoder.items()
                if is_structural(token.content, is_special=token.special)
            }
        )

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        return {token_id: name for name, token_id in self._backend.get_vocab().items()}

    def describe(self) -> dict[str, Any]:
        """Returns what others need to write prompts alike: special tokens by their roles, and the template.

        chat_template is None without one; of several it is the default.
        """
        template, roles = self._backend.chat_template, self._backend.special_tokens_map
        is_file = isinstance(self._backend, TokenizerFile)
        return {
            "tokenizer_class": "PreTrainedTokenizerFast" if is_file else type(self._backend).__name__,
            **{role: roles.get(role) for role in ("bos_token", "eos_token", "pad_token", "unk_token")},
            "chat_template": template.get("default") if isinstance(template, Mapping) else template,
        }

    @property
    def chat_templates(self) -> str:
        """The text of the model's chat template, of several all; empty without one."""
        known = self._backend.chat_template or ""
        return "\n".join(known.values()) if isinstance(known, Mapping) else str(known)

    @property
    def loses_first_space(self) -> bool:
        """Whether a text begins without the space that its first token has."""
        return bool(self._before)

    def as_json(self) -> str:
        """Returns the tokenizer as a tokenizer.json has it; UnsupportedError for one without such a form."""
        backend = getattr(self._backend, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedError(
                "structured_outputs needs a tokenizer with a tokenizer.json, and this one is Python's own"
            )
        return str(backend.to_str())

    def text_of(self, token_id: int) -> str:
        """Returns the text that a token has within a text: with the space that the first of a text loses."""
        text = self._texts.get(token_id)
        if text is None:
            before = self.decode(self._before)
            text = self.decode([*self._before, token_id], skip_special_tokens=False)[len(before) :]
            self._texts[token_id] = text
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """Returns the bytes that a token has within a text: of one that is part of a character its own."""
        text = self.text_of(token_id)
        if REPLACEMENT not in text:
            return text.encode()
        return bytes_of_piece(self._pieces.get(token_id, ""), text)

    @cached_property
    def _pieces(self) -> dict[int, str]:
        return {token_id: piece for piece, token_id in self._backend.get_vocab().items()}

    def _word_before(self, vocabulary: Mapping[str, int]) -> list[int]:
        """A token to decode others behind, where the space that begins a text is lost; else empty."""
        named = ((token_id, text) for text, token_id in vocabulary.items() if text.startswith(SPACE))
        spaced = min(named, default=None)  # a vocabulary has no order of its own
        if spaced is None or self.decode([spaced[0]]) == spaced[1].replace(SPACE, " "):
            return []
        words = [
            token_id
            for text, token_id in vocabulary.items()
            if text.isascii() and text.isalpha() and token_id not in self.special_tokens
        ]
        return sorted(words)[:1]

    def _byte_tokens(self, vocabulary: Mapping[str, int]) -> dict[int, int]:
        """The bytes of SentencePiece's byte tokens, by id; one bad byte spoils the text of a whole run."""
        names = ((f"<0x{byte:02X}>", byte) for byte in range(256))
        found = {vocabulary[name]: byte for name, byte in names if name in vocabulary}
        letters = [
            token_id for token_id, byte in found.items() if chr(byte).isascii() and chr(byte).isalpha()
        ]
        others = [token_id for token_id, byte in found.items() if byte >= 0x80]
        spoils = letters and others and self.decode([letters[0], others[0]]) == "\ufffd" * 2
        return found if spoils else {}

    def apply_chat_template(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Messages | None = None,
        max_tokens: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
    ) -> list[int]:
        """Returns the token ids of a conversation as the model's own template writes it, or the one given."""
        given = tools, template_kwargs, continue_final_message, chat_template
        text = self.render_chat(messages, add_generation_prompt, *given)
        return self.encode(text, add_special_tokens=False, max_tokens=max_tokens)

    def render_chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Messages | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
    ) -> str:
        """Returns a conversation as text, as the model's own template writes it, or the one given."""
        check_messages(messages)
        _check_tools(tools)
        check_flag("continue_final_message", continue_final_message)
        check_flag("add_generation_prompt", add_generation_prompt)
        variables = check_template_kwargs(template_kwargs)
        template = self._template(chat_template, bool(tools))
        if tools and "tools" not in template:
            raise RequestError(
                "this model's chat template does not read tools, so the model would not hear of them; "
                "give none, or a tokenizer= whose template does"
            )
        variables |= {
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "chat_template": template,
        }
        return self._rendered(messages, continue_final_message, variables)

    def template_reads(self, name: str, chat_template: str | None = None) -> bool:
        """Whether the chat template, the model's or the one given, holds a variable of that name."""
        return re.search(rf"\b{re.escape(name)}\b", self._template(chat_template, False)) is not None

    def _rendered(self, messages: Messages, continues: bool, variables: Mapping[str, Any]) -> str:
        """Returns the text of the first form of the messages that the template takes."""
        first: Exception | None = None
        for form in readable(messages, variables["chat_template"]):
            given = marked(form) if continues else form
            try:
                text = self._backend.apply_chat_template(given, tokenize=False, **variables)
            except Exception as error:  # a template is a stranger's program: anything may come out of it
                first = first or error
                continue
            return until_mark(text) if continues else text
        raise RequestError(f"the chat template refuses these messages: {clipped(str(first), 500)}") from first

    def _template(self, given: Any, has_tools: bool) -> str:
        """Returns the template given, by its text or its name, else the model's for tools or for none."""
        known = self._backend.chat_template
        if given is not None and (not isinstance(given, str) or str.__str__(given) == ""):
            raise RequestError(f"chat_template is {shown(given)}; wanted the text of a template")
        if given is not None:
            given = str.__str__(given)  # before a subclass is asked anything
            return str(known[given]) if isinstance(known, Mapping) and given in known else given
        if not known:
            raise RequestError(
                "this model's tokenizer has no chat template; add chat_template.jinja to its folder, give "
                "chat_template=, or use generate() with a prompt of your own"
            )
        try:
            return chosen(known, has_tools)
        except ValueError as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error


def _plain(text: str) -> str:
    """The text, before a subclass is asked anything."""
    if not isinstance(text, str):
        raise RequestError(f"a prompt is a {type(text).__name__}; wanted a string or a list of token ids")
    return str.__str__(text)


def _last_place(ids: Sequence[int], part: Sequence[int]) -> int | None:
    """Where these ids stand last among those; None where they do not."""
    starts = range(len(ids) - len(part), -1, -1)
    return next((start for start in starts if ids[start : start + len(part)] == part), None)


def load_tokenizer(folder: Path, *, override: Any = None) -> Tokenizer | None:
    """Returns the folder's tokenizer, None where it has none; override: another folder or a tokenizer object.

    A tokenizer object stays the caller's: a copy of it is used.
    """
    if override is not None and not isinstance(override, (str, Path)):
        if not hasattr(override, "added_tokens_decoder"):
            raise ConfigError(f"tokenizer is {shown(override)}; wanted a folder or a transformers tokenizer")
        return Tokenizer(copy.deepcopy(override))
    if override is not None:
        folder = Path(override).expanduser()
        if not has_tokenizer(folder):
            raise LoadError(
                f"tokenizer is {shown(str(override))}, but there is none of {', '.join(TOKENIZER_FILES)}"
            )
    elif (folder / TOKENIZER_ERROR).is_file():
        raise LoadError((folder / TOKENIZER_ERROR).read_text(encoding="utf-8"))
    return Tokenizer(_load_backend(folder)) if has_tokenizer(folder) else None


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer's files."""
    return any(os.path.lexists(folder / name) for name in TOKENIZER_FILES)


def require_tokenizer(folder: Path) -> None:
    """Raises LoadError where a model's folder has no tokenizer."""
    if not has_tokenizer(folder):
        raise LoadError(
            f"{folder} has no tokenizer, so that texts cannot be read: it has none of "
            f"{', '.join(TOKENIZER_FILES)}; name a folder that has one with --tokenizer, in Python tokenizer="
        )


def _load_backend(folder: Path) -> Any:
    try:
        why = obstacle(folder)
        if why is None:
            if warns_of_words(folder):
                logger.warning(
                    "%s cuts words by an expression known to be wrong for Mistral's models, so that some ids "
                    'differ from those of its training; "fix_mistral_regex": true in tokenizer_config.json '
                    "mends it",
                    folder / TOKENIZER_JSON,
                )
            return TokenizerFile(folder)
        logger.info("the tokenizer is read by transformers, which takes seconds to import: %s", why)
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        kind = PreTrainedTokenizerFast if (folder / TOKENIZER_JSON).is_file() else AutoTokenizer
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except LaminaError:
        raise
    except Exception as error:  # the tokenizers library raises nothing more precise
        if is_out_of_memory(error):
            raise
        raise LoadError(
            f"{_damaged_file(folder)} cannot be read as a tokenizer: {error}; download it again, or name "
            "another one with tokenizer="
        ) from error


def _damaged_file(folder: Path) -> Path:
    """The first file that is no JSON object, else the one that holds the tokenizer."""
    for path in (folder / name for name in JSON_FILES if (folder / name).is_file()):
        try:
            if not isinstance(json.loads(path.read_bytes()), dict):
                return path
        except (ValueError, RecursionError):
            return path
    return next(folder / name for name in TOKENIZER_FILES if os.path.lexists(folder / name))


def _check_tools(tools: Any) -> None:
    is_list = isinstance(tools, Sequence) and not isinstance(tools, str)
    if tools is not None and not (is_list and all(isinstance(tool, Mapping) for tool in tools)):
        raise RequestError(f"tools is {shown(tools)}; wanted a list of JSON schemas of functions, as dicts")
