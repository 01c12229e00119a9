"""Bodies of /tokenize and /detokenize."""

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoding import Body, Unserved
from .response_models import ResponseModel
from .unserved import NO_TOOLS

NO_TEMPLATE = Unserved(why="a conversation is written by the model's own template; leave it out")


class TokenizeRequest(Body, kw_only=True, frozen=True):
    """A text, or a conversation as the chat template writes it, whose token ids are wanted."""

    unserved: ClassVar[Mapping[str, Unserved]] = {"tools": NO_TOOLS, "chat_template": NO_TEMPLATE}
    large: ClassVar[frozenset[str]] = frozenset({"prompt", "messages"})

    prompt: str | None = None
    """The text; either this or messages."""
    messages: list[dict[str, Any]] | None = None
    """The conversation."""
    add_special_tokens: bool | None = None
    """Whether special tokens are added to a prompt, by default true; a template writes its own."""
    add_generation_prompt: bool = True
    """Whether the template opens the turn that a model is to write."""
    continue_final_message: bool = False
    """Whether the last message is left open."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template."""
    return_token_strs: bool = False
    """Whether tokens are told as the vocabulary spells them, too."""


class DetokenizeRequest(Body, kw_only=True, frozen=True):
    """Token ids whose text is wanted."""

    large: ClassVar[frozenset[str]] = frozenset({"tokens"})

    tokens: list[int]
    """Token ids; special ones become text as well."""


class Tokenized(ResponseModel, kw_only=True):
    """The tokens of a text or conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None
    """Each as the vocabulary spells it, where that was asked."""


class Detokenized(ResponseModel, kw_only=True):
    """The text of tokens."""

    prompt: str


class TokenizerInfo(ResponseModel, kw_only=True):
    """What a client needs to write prompts alike."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
