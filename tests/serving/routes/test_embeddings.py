"""Vectors, classes and scores over HTTP: what clients ask and get, bit for bit, and what is refused."""

import array
import base64

import jsonschema
import numpy as np
import openai
import pytest
from transformers import LlamaForSequenceClassification

from ...pooling_models import (
    TEXTS,
    cross_encoder_of,
    edit,
    embedder_of,
    plain,
    quietly,
    save_embedder,
    save_model,
    save_reranker,
)

NAME = "tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, bbpe_tokenizer):
    prompts = {"query": "the world: "}
    return save_embedder(
        tmp_path_factory.mktemp("embedder"), plain(bbpe_tokenizer()), "mean", prompts=prompts
    )


@pytest.fixture(scope="module")
def embedder(folder, start_server):
    return start_server(folder=folder)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory, bbpe_tokenizer, start_server):
    path = tmp_path_factory.mktemp("classifier")
    save_model(path, "ForSequenceClassification", bbpe_tokenizer(), num_labels=3)
    edit(path / "config.json", id2label={"0": "bad", "1": "fair", "2": "good"})
    return start_server(folder=path)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory, bbpe_tokenizer, start_server):
    return start_server(folder=save_reranker(tmp_path_factory.mktemp("reranker"), bbpe_tokenizer()))


def post(server, path, **body):
    answer = server.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(server, path, **body):
    answer = server.client.post(path, json=body)
    assert 400 <= answer.status_code < 500, answer.text
    return answer.json()["error"]


def numbers_of(entry):
    return np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")


def test_the_client_of_openai_gets_the_vectors_of_sentence_transformers(embedder, folder):
    expected = embedder_of(folder).encode(list(TEXTS))
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as client:
        for format_ in ("float", "base64", openai.NOT_GIVEN):
            answer = client.embeddings.create(model=NAME, input=list(TEXTS), encoding_format=format_)
            assert [each.index for each in answer.data] == list(range(len(TEXTS)))
            vectors = [each.embedding for each in answer.data]
            if format_ == "base64":
                vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
            np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
        cut = client.embeddings.create(model=NAME, input=TEXTS[0], dimensions=8)
        assert len(cut.data[0].embedding) == 8
        assert np.linalg.norm(cut.data[0].embedding) == pytest.approx(1.0, abs=1e-6)


def test_base64_and_lists_hold_the_same_bits(embedder):
    for text in TEXTS:
        listed = post(embedder, "/v1/embeddings", input=text)["data"][0]["embedding"]
        encoded = post(embedder, "/v1/embeddings", input=text, encoding_format="base64")["data"][0]
        assert array.array("f", listed).tobytes() == numbers_of(encoded).tobytes()


def test_token_ids_texts_and_lists_of_either_are_taken(embedder):
    ids = embedder.client.post("/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
    (expected,) = post(embedder, "/v1/embeddings", input=TEXTS[0], encoding_format="base64")["data"]
    for given in (ids, [ids], [TEXTS[0]], [TEXTS[0]] * 20, [ids] * 3):
        answer = post(embedder, "/v1/embeddings", input=given, encoding_format="base64")
        for entry in answer["data"]:
            np.testing.assert_allclose(numbers_of(entry), numbers_of(expected), rtol=0, atol=1e-6)
        assert answer["usage"]["prompt_tokens"] == len(ids) * len(answer["data"])


def test_prompts_of_the_checkpoint_are_asked_for_by_name(embedder, folder):
    reference = embedder_of(folder)
    answer = post(embedder, "/v1/embeddings", input=TEXTS[0], prompt_name="query")
    expected = reference.encode(TEXTS[0], prompt_name="query")
    np.testing.assert_allclose(answer["data"][0]["embedding"], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "body,param",
    [
        ({"input": ""}, None),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [3, 999999]}, "input"),
        ({"input": ["a", "b " * 300]}, "input[1]"),
        ({"input": [[1], [1, 320]]}, "input[1]"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "prompt_name": "passage"}, "prompt_name"),
        ({"input": "a", "prompt_name": "query", "prompt": "b"}, None),
        ({"input": "a", "messages": [{"role": "user", "content": "b"}]}, "messages"),
        ({"input": "a", "input_type": "query"}, "input_type"),
        ({"input": "a", "model": "other"}, "model"),
        ({"input": 5}, "input"),
        ({"input": [["a"]]}, "input[0][0]"),
        ({}, "input"),
        ({"input": ["a"] * 1025}, "input"),
    ],
)
def test_what_cannot_be_embedded_is_refused_and_the_field_named(embedder, body, param):
    if body == {"input": ""}:
        body = {"input": "", "add_special_tokens": False}
        param = "input"
    assert refused(embedder, "/v1/embeddings", **body)["param"] == param


def test_longer_texts_are_an_error_unless_they_may_be_cut(embedder):
    long = "b " * 300
    error = refused(embedder, "/v1/embeddings", input=long)
    assert error["code"] == "context_length_exceeded"
    assert (
        post(embedder, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"]
        == 256
    )
    assert (
        post(embedder, "/v1/embeddings", input=long, truncate_prompt_tokens=9)["usage"]["prompt_tokens"] == 9
    )


def test_a_model_says_what_may_be_asked_of_it_and_refuses_the_rest(embedder, classifier, reranker, server):
    tasks = {
        embedder: ["embed", "score"],
        classifier: ["classify"],
        reranker: ["score"],
        server: ["generate"],
    }
    asked = {
        "generate": ("/v1/completions", {"prompt": "a"}),
        "embed": ("/v1/embeddings", {"input": "a"}),
        "classify": ("/classify", {"input": "a"}),
        "score": ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    }
    for each, served in tasks.items():
        assert each.client.get("/v1/models").json()["data"][0]["tasks"] == served
        for task, (path, body) in asked.items():
            if task in served:
                post(each, path, **body)
            else:
                error = refused(each, path, **body)
                assert error["code"] == "unsupported"
                assert f"does not {task}" in error["message"]
                assert served[0] in error["message"]
    message = {"messages": [{"role": "user", "content": "a"}]}
    assert "does not generate" in refused(embedder, "/v1/chat/completions", **message)["message"]


def test_classes_have_labels_and_probabilities(classifier):
    answer = post(classifier, "/classify", input=list(TEXTS[:3]))
    model = quietly(LlamaForSequenceClassification.from_pretrained, classifier.folder).eval()
    for text, entry in zip(TEXTS, answer["data"], strict=False):
        ids = classifier.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
        logits = model(model.dummy_inputs["input_ids"].new_tensor([ids])).logits[0].detach()
        np.testing.assert_allclose(entry["probs"], logits.softmax(-1).numpy(), atol=1e-5)
        assert entry["label"] == ["bad", "fair", "good"][int(logits.argmax())]
        assert entry["num_classes"] == 3
        raw = post(classifier, "/classify", input=text, activation=False)["data"][0]["probs"]
        np.testing.assert_allclose(raw, logits.numpy(), atol=1e-4)


def test_scores_and_ranks_are_those_of_sentence_transformers(reranker):
    query, documents = "hello world", ["the the", "b", "he said", "x" * 30]
    expected = cross_encoder_of(reranker.folder).predict([(query, each) for each in documents])
    scored = post(reranker, "/v1/score", text_1=query, text_2=documents)
    np.testing.assert_allclose([each["score"] for each in scored["data"]], expected, atol=1e-5)
    assert post(reranker, "/score", queries=[query], documents=documents)["data"] == scored["data"]
    ranked = post(
        reranker, "/v1/rerank", query=query, documents=[{"text": documents[0]}, *documents[1:]], top_n=3
    )
    order = sorted(range(4), key=lambda index: -expected[index])[:3]
    assert [each["index"] for each in ranked["results"]] == order
    assert [each["document"]["text"] for each in ranked["results"]] == [documents[index] for index in order]
    bare = post(reranker, "/v2/rerank", query=query, documents=documents, return_documents=False)
    assert all("document" not in each for each in bare["results"])
    assert bare["usage"]["prompt_tokens"] == scored["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "path,body,param",
    [
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1"),
        ("/v1/score", {"text_1": [], "text_2": "c"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": ["c", "d" * 300]}, "text_2[1]"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
        ("/v1/rerank", {"documents": ["b"]}, "query"),
    ],
)
def test_what_cannot_be_scored_is_refused_and_the_field_named(reranker, path, body, param):
    assert refused(reranker, path, **body)["param"] == param


def test_answers_are_what_openapi_says(embedder, classifier, reranker):
    document = embedder.client.get("/openapi.json").json()
    texts = {"input": list(TEXTS[:2])}
    for server, path, body in (
        (embedder, "/v1/embeddings", texts),
        (embedder, "/v1/embeddings", {**texts, "encoding_format": "base64"}),
        (embedder, "/v1/rerank", {"query": "a", "documents": ["b"]}),
        (classifier, "/classify", texts),
        (reranker, "/v1/score", {"text_1": "a", "text_2": ["b"]}),
        (reranker, "/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        answers = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        schema = {**answers, "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(post(server, path, **body))


def test_texts_are_counted_as_prompts_and_no_tokens_as_answers(embedder):
    before = embedder.client.get("/metrics").text
    answer = post(embedder, "/v1/embeddings", input=list(TEXTS))
    after = embedder.client.get("/metrics").text

    def value(page, name):
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))

    prompts, answers = "lamina:prompt_tokens_total", "lamina:generation_tokens_total"
    assert value(after, prompts) - value(before, prompts) == answer["usage"]["prompt_tokens"]
    assert value(after, answers) == value(before, answers)
