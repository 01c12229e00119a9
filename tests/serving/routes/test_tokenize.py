"""Texts as token ids over HTTP and back, as the model's own tokenizer has them."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lamina.runtime.tokenization.tokenizer import Tokenizer, load_tokenizer
from lamina.serving.routes import tokenize

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_text_folder: Path) -> Tokenizer:
    found = load_tokenizer(tiny_text_folder)
    assert found is not None
    return found


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60), has_bos=st.booleans())
def test_a_text_is_tokenized_as_the_tokenizer_does_and_comes_back(
    client: httpx.Client, tokenizer: Tokenizer, text: str, has_bos: bool
) -> None:
    told = post(client, "/tokenize", prompt=text, add_special_tokens=has_bos)
    assert told["tokens"] == tokenizer.encode(text, has_bos)
    assert told["count"] == len(told["tokens"])
    assert told["token_strs"] is None
    back = post(client, "/detokenize", tokens=told["tokens"])
    assert back == {"prompt": tokenizer.decode(told["tokens"], skip_special_tokens=False)}
    if not has_bos and "<" not in text:
        assert back["prompt"] == text


def test_special_tokens_are_added_unless_told_otherwise(client: httpx.Client) -> None:
    with_bos = post(client, "/tokenize", prompt="hello", model="tiny")
    assert with_bos["tokens"][0] == 1
    assert with_bos["max_model_len"] == 256
    assert post(client, "/tokenize", prompt="hello", add_special_tokens=False)["tokens"][0] != 1


def test_tokens_are_spelt_on_demand(client: httpx.Client, tokenizer: Tokenizer) -> None:
    told = post(client, "/tokenize", prompt="hello ü", return_token_strs=True)
    assert told["token_strs"] == tokenizer.names_of(told["tokens"])


@pytest.mark.parametrize("opens", [True, False])
def test_a_conversation_is_written_by_the_template(
    client: httpx.Client, tokenizer: Tokenizer, opens: bool
) -> None:
    told = post(client, "/tokenize", messages=MESSAGES, add_generation_prompt=opens)
    assert told["tokens"] == tokenizer.apply_chat_template(MESSAGES, opens)
    last = [*MESSAGES, {"role": "assistant", "content": "he"}]
    asked = {"messages": last, "add_generation_prompt": False, "continue_final_message": True}
    assert post(client, "/tokenize", **asked)["tokens"][-1] == tokenizer.encode("he", False)[-1]


def test_a_text_beyond_the_context_is_counted(client: httpx.Client) -> None:
    assert post(client, "/tokenize", prompt="é" * 40_000)["count"] == 80_001


def test_a_text_far_beyond_any_context_is_refused(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "MAX_TOKENS", 1000)  # of 262,144, which take seconds
    messages = [{"role": "user", "content": "é" * 40_000}]
    for path in ("/tokenize", "/v1/messages/count_tokens"):
        assert client.post(path, json={"messages": messages}).status_code == 400
    assert client.post("/tokenize", json={"prompt": "é" * 40_000}).status_code == 400


@pytest.mark.parametrize(
    "path,body,param",
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, None),
        ("/tokenize", {"messages": [5]}, "messages[0]"),
        ("/tokenize", {"messages": [{"content": "a"}]}, None),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, "tools"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}}, None),
        ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [1, 320]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**30]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [[1]]}, "tokens[0]"),
    ],
)
def test_what_is_wrong_is_named(client: httpx.Client, path: str, body: Any, param: str | None) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_an_unknown_model_is_not_found(client: httpx.Client, path: str) -> None:
    answer = client.post(path, json={"prompt": "a", "tokens": [1], "model": "another"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_unknown_fields_are_told(client: httpx.Client) -> None:
    answer = client.post("/tokenize", json={"prompt": "a", "with_pieces": True})
    assert answer.headers["x-lamina-ignored-fields"] == "with_pieces"


def test_no_tokens_are_no_text(client: httpx.Client) -> None:
    assert post(client, "/detokenize", tokens=[]) == {"prompt": ""}


def test_a_client_can_write_the_same_prompts(client: httpx.Client, tokenizer: Tokenizer) -> None:
    told = client.get("/tokenizer_info").json()
    assert told == tokenizer.describe()
    assert (told["bos_token"], told["eos_token"], told["pad_token"]) == ("<s>", "</s>", "<pad>")
    assert "add_generation_prompt" in told["chat_template"]
