"""LangChain's ChatOpenAI and OpenAI; needs the extra `clients`."""

import asyncio
from typing import Any

import pytest

langchain_openai = pytest.importorskip(
    "langchain_openai", reason="langchain-openai is not installed: pip install -e '.[clients]'"
)
pytestmark = pytest.mark.filterwarnings("default")  # its own: it is not ours to mend


@pytest.fixture
def chat(server: Any) -> Any:
    settings = {"base_url": f"{server.url}/v1", "api_key": "none", "temperature": 0, "max_retries": 0}
    return langchain_openai.ChatOpenAI(model="tiny", max_tokens=12, **settings)


def test_a_chat_comes_whole_as_it_comes_in_pieces(chat: Any) -> None:
    whole = chat.invoke("hello")
    assert whole.usage_metadata["output_tokens"] == 12
    assert whole.response_metadata["finish_reason"] in ("length", "stop")
    pieces = list(chat.stream("hello", stream_usage=True))
    assert "".join(piece.content for piece in pieces) == whole.content
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    assert total.usage_metadata["input_tokens"] == whole.usage_metadata["input_tokens"]
    assert total.usage_metadata["output_tokens"] == 12


def test_log_probabilities_reach_the_metadata(chat: Any) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke("hello")
    told = answer.response_metadata["logprobs"]["content"]
    assert len(told) == 12
    assert all(len(token["top_logprobs"]) == 2 for token in told)


def test_many_chats_run_at_once(chat: Any) -> None:
    async def ask() -> list[Any]:
        answers: list[Any] = await chat.abatch([f"hello {number}" for number in range(6)])
        return answers

    assert all(answer.usage_metadata["output_tokens"] <= 12 for answer in asyncio.run(ask()))


def test_a_completion_is_served(server: Any) -> None:
    completion = langchain_openai.OpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=8, max_retries=0
    )
    assert completion.invoke("hello") == "".join(completion.stream("hello"))
