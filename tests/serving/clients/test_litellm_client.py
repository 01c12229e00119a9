"""LiteLLM by its providers hosted_vllm/ and openai/; needs the extra `clients`."""

import os
from typing import Any

import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or its import asks the network
litellm = pytest.importorskip("litellm", reason="litellm is not installed: pip install -e '.[clients]'")

pytestmark = pytest.mark.filterwarnings("default")  # its own: it is not ours to mend
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(params=["hosted_vllm/tiny", "openai/tiny"])
def asked(request: pytest.FixtureRequest, server: Any) -> dict[str, Any]:
    return {
        "model": request.param,
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 12,
        "num_retries": 0,
    }


def test_a_chat_comes_whole_as_it_comes_in_pieces(asked: dict[str, Any]) -> None:
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 12
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert usages[-1].completion_tokens == 12


def test_a_prompt_over_the_context_is_recognised(asked: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "long " * 400}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**asked, "messages": messages})


def test_fields_of_the_server_alone_are_passed_on(asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked, extra_body={"min_tokens": 12, "ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"


def test_an_unknown_model_is_not_found(asked: dict[str, Any]) -> None:
    provider = asked["model"].partition("/")[0]
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked, "model": f"{provider}/another"})
