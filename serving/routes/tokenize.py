"""Texts as token ids and back: POST /tokenize and /detokenize, GET /tokenizer_info."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ...common.errors import shown
from ...runtime.tokenization.chat_messages import Messages
from ...runtime.tokenization.tokenizer import Tokenizer
from ..context import Serving, serving_of
from ..errors import ApiError
from ..middleware.body import read_body
from ..protocol.decoding import wrong
from ..protocol.tokenize import DetokenizeRequest, TokenizeRequest
from ..served_models import models_of, require_loaded
from ..streaming.handlers import beside_loop, receive

MAX_TOKENS = 2**18  # of a text: far more are refused before they are all found


async def tokenize(request: Request) -> Response:
    """Answers {count, max_model_len, tokens, token_strs} of a text or a conversation."""
    received = await receive(request, TokenizeRequest, await read_body(request))
    serving = serving_of(request)
    asked, tokenizer = received.given, tokenizer_of(serving)

    def written() -> bytes:
        token_ids = _token_ids(tokenizer, asked)
        answer = {
            "count": len(token_ids),
            "max_model_len": serving.runtime.input.max_model_len,
            "tokens": token_ids,
            "token_strs": tokenizer.names_of(token_ids) if asked.return_token_strs else None,
        }
        return msgspec.json.encode(answer)

    return _json(await beside_loop(received.is_large, written), received.headers)


async def detokenize(request: Request) -> Response:
    """Answers {prompt}: the text of token ids, special ones included."""
    received = await receive(request, DetokenizeRequest, await read_body(request))
    serving = serving_of(request)
    asked, tokenizer = received.given, tokenizer_of(serving)
    _check_ids(asked.tokens, serving.runtime.input.vocab_size)

    def written() -> bytes:
        return msgspec.json.encode({"prompt": tokenizer.decode(asked.tokens, skip_special_tokens=False)})

    return _json(await beside_loop(received.is_large, written), received.headers)


async def tokenizer_info(request: Request) -> Response:
    """Answers what a client needs to write prompts alike: special tokens by their roles, and the template.

    ?model= names one of several.
    """
    serving = models_of(request).find(request.query_params.get("model"))
    await require_loaded(request, serving, serving.config.model_names[0])
    return JSONResponse(tokenizer_of(serving).describe())


def tokenizer_of(serving: Serving) -> Tokenizer:
    """Returns the model's tokenizer; ApiError 400 where it has none."""
    tokenizer: Tokenizer | None = serving.runtime.input.tokenizer
    if tokenizer is None:
        raise ApiError(
            status=400, message="the model has no tokenizer here; send token ids", code="unsupported"
        )
    return tokenizer


def conversation_ids(
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: dict[str, Any] | None = None,
    tools: Messages | None = None,
) -> list[int]:
    """Returns the token ids of a conversation, longer than the context too."""
    return tokenizer.apply_chat_template(
        messages,
        add_generation_prompt,
        tools,
        max_tokens=MAX_TOKENS,
        template_kwargs=template_kwargs,
        continue_final_message=continue_final_message,
    )


def _json(body: bytes, headers: Mapping[str, str]) -> Response:
    return Response(body, media_type="application/json", headers=dict(headers))


def _token_ids(tokenizer: Tokenizer, asked: TokenizeRequest) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        raise wrong("prompt", "prompt and messages: wanted one of the two")
    if asked.prompt is not None:
        is_special = asked.add_special_tokens is not False
        return tokenizer.encode(asked.prompt, is_special, max_tokens=MAX_TOKENS)
    if asked.add_special_tokens:
        raise wrong("add_special_tokens", "add_special_tokens is true; a chat template writes its own")
    if asked.add_generation_prompt and asked.continue_final_message:
        message = "continue_final_message and add_generation_prompt are both true; wanted at most one"
        raise wrong("continue_final_message", message)
    return conversation_ids(
        tokenizer,
        asked.messages or [],
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        template_kwargs=asked.chat_template_kwargs,
    )


def _check_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    for place in (min, max):
        found = place(token_ids, default=0)
        if not 0 <= found < vocab_size:
            index = token_ids.index(found)
            message = (
                f"tokens[{index}] is {shown(found)}; wanted ids of the vocabulary, 0 to {vocab_size - 1}"
            )
            raise wrong(f"tokens[{index}]", message)


ROUTES: list[BaseRoute] = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
]
