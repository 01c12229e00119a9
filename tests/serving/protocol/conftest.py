"""What the protocol is tested with: default limits, and an input processor without a model behind it."""

import json

import pytest

from lamina.runtime.engine.input_processor import InputProcessor
from lamina.runtime.tokenization.tokenizer import Tokenizer
from lamina.serving.config import ServeConfig
from lamina.serving.errors import ApiError
from lamina.serving.protocol.chat import ChatRequest
from lamina.serving.protocol.decoding import decode

MESSAGES = [{"role": "user", "content": "hello"}]


class Defaults:
    """Of a checkpoint that leaves everything open."""

    temperature = top_k = top_p = min_p = typical_p = repetition_penalty = None


@pytest.fixture(scope="session")
def config():
    """The limits of a server as they are by default."""
    return ServeConfig(model_names=("tiny",))


@pytest.fixture(scope="session")
def new_processor(bbpe_tokenizer):
    """new_processor(max_model_len) -> an input processor with a byte-level tokenizer."""

    def make(max_model_len=256, tokenizer=None):
        return InputProcessor(
            tokenizer=tokenizer or Tokenizer(bbpe_tokenizer()),
            defaults=Defaults(),
            chat_defaults=Defaults(),
            eos_token_ids=frozenset([2]),
            vocab_size=320,
            num_valid_ids=267,
            grammars=None,
            max_model_len=max_model_len,
            declared_len=max_model_len,
            capacity_tokens=4096,
            seed=0,
        )

    return make


@pytest.fixture(scope="session")
def processor(new_processor):
    """An input processor of 256 tokens of context."""
    return new_processor()


@pytest.fixture(scope="session")
def read(config, processor):
    """read(kind, body) -> request, parameters, options, prompts: all that a route makes of a body."""

    def read_whole(kind, body, *, strict=False):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = decode(kind, raw, strict=strict).request
        params, options = request.sampling_params(config), request.options()
        if kind is ChatRequest:
            return request, params, options, [request.prompt(processor, config)]
        return request, params, options, request.prompts(processor, config)

    return read_whole


@pytest.fixture(scope="session")
def refused(read):
    """refused(kind, body) -> the 400 that a body is answered with."""

    def error_of(kind, body, **options):
        with pytest.raises(ApiError) as caught:
            read(kind, body, **options)
        assert caught.value.status == 400
        assert len(caught.value.body()) < 6000
        return caught.value

    return error_of
