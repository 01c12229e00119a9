"""Vectors of texts equal those of sentence-transformers, however they are scheduled."""

import numpy as np
import pytest
import torch

from lamina import Runtime

from ...pooling_models import POOLINGS, TEXTS, embedder_of, plain, quietly, save_embedder, save_model

SCHEDULES = {
    "whole": {},
    "chunks": {"prefill_chunk": 7},
    "small steps": {"max_num_batched_tokens": 13, "max_num_seqs": 3},
    "one by one": {"max_num_seqs": 1, "prefix_cache": False},
    "preempted": {"num_kv_blocks": 9, "block_size": 16, "max_num_batched_tokens": 32},
}
FP32 = {"rtol": 0.0, "atol": 1e-5}


def open_runtime(folder, **settings):
    return Runtime.from_pretrained(
        folder, **{"compile": False, "dtype": "float32", "device": "cpu"} | settings
    )


def vectors(outputs):
    return np.stack([output.embedding for output in outputs])


@pytest.fixture(scope="module")
def embedders(tmp_path_factory, bbpe_tokenizer):
    made = {}

    def make(pooling="mean", **options):
        key = repr((pooling, sorted(options.items())))
        if key not in made:
            folder = save_embedder(
                tmp_path_factory.mktemp("embedder"), plain(bbpe_tokenizer()), pooling, **options
            )
            made[key] = folder, embedder_of(folder)
        return made[key]

    return make


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_equal_those_of_sentence_transformers(embedders, pooling, schedule):
    folder, reference = embedders(pooling)
    expected = reference.encode(list(TEXTS), batch_size=1)
    with open_runtime(folder, **SCHEDULES[schedule]) as runtime:
        np.testing.assert_allclose(vectors(runtime.embed(TEXTS)), expected, **FP32)
        np.testing.assert_allclose(vectors(runtime.embed(TEXTS)), expected, **FP32)  # beside a prefix cache
        for text, row in zip(TEXTS, expected, strict=True):
            (alone,) = runtime.embed(text)
            np.testing.assert_allclose(alone.embedding, row, **FP32)
            assert alone.num_prompt_tokens == len(reference.tokenizer(text)["input_ids"])


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dense", [(), (24,), (48, 16)])
def test_dense_modules_and_lengths_are_those_of_the_checkpoint(embedders, dense, normalize):
    folder, reference = embedders("mean", dense=dense, normalize=normalize)
    with open_runtime(folder) as runtime:
        np.testing.assert_allclose(
            vectors(runtime.embed(TEXTS)), reference.encode(list(TEXTS)), rtol=1e-5, atol=1e-5
        )
        np.testing.assert_allclose(
            vectors(runtime.embed(TEXTS, normalize=True)),
            reference.encode(list(TEXTS), normalize_embeddings=True),
            **FP32,
        )


@pytest.mark.parametrize("dimensions", [1, 7, 64])
def test_vectors_are_cut_before_they_get_the_length_one(embedders, dimensions):
    folder, reference = embedders("last")
    expected = reference.encode(list(TEXTS), truncate_dim=dimensions, normalize_embeddings=True)
    with open_runtime(folder) as runtime:
        np.testing.assert_allclose(vectors(runtime.embed(TEXTS, dimensions=dimensions)), expected, **FP32)


def test_prompts_are_those_of_the_checkpoint(embedders):
    prompts = {"query": "the world: ", "document": "he ", "other": "Hello! "}
    folder, reference = embedders("mean", prompts=prompts, default_prompt_name="other")
    texts = list(TEXTS)
    with open_runtime(folder) as runtime:
        for given in ({}, {"prompt_name": "query"}, {"prompt": "what "}, {"prompt": ""}):
            expected = reference.encode(texts, **given)
            np.testing.assert_allclose(vectors(runtime.embed(texts, **given)), expected, **FP32)
        queries, documents = reference.encode_query(texts[:1]), reference.encode_document(texts[1:])
        expected = reference.similarity(queries, documents)[0].numpy()
        found = [output.score for output in runtime.score(texts[0], texts[1:])]
        np.testing.assert_allclose(found, expected, **FP32)


@pytest.mark.parametrize("measure", ["cosine", "dot", "euclidean", "manhattan"])
def test_scores_of_vectors_are_measured_as_the_checkpoint_says(embedders, measure):
    folder, reference = embedders("mean", normalize=False, similarity_fn_name=measure)
    ours = list(TEXTS)
    first, others = reference.encode(ours[:1]), reference.encode(ours[1:])
    with open_runtime(folder) as runtime:
        found = [output.score for output in runtime.score(ours[0], ours[1:])]
        np.testing.assert_allclose(
            found, reference.similarity(first, others)[0].numpy(), rtol=1e-5, atol=2e-5
        )
        pairs = runtime.score(ours[:2], ours[2:4])
        expected = reference.similarity_pairwise(reference.encode(ours[:2]), reference.encode(ours[2:4]))
        np.testing.assert_allclose([each.score for each in pairs], expected.numpy(), rtol=1e-5, atol=2e-5)


def test_texts_are_written_by_the_chat_template_where_the_checkpoint_was_saved_with_one(
    tmp_path, bbpe_tokenizer
):
    folder = save_embedder(tmp_path, bbpe_tokenizer(), "last")
    reference = embedder_of(folder)
    with open_runtime(folder) as runtime:
        np.testing.assert_allclose(vectors(runtime.embed(TEXTS)), reference.encode(list(TEXTS)), **FP32)
        found = runtime.embed(TEXTS, prompt="the ")
        np.testing.assert_allclose(vectors(found), reference.encode(list(TEXTS), prompt="the "), **FP32)


@pytest.mark.parametrize("keep", [2, 5, 30])
def test_longer_texts_are_cut_as_sentence_transformers_cuts_them(embedders, keep):
    folder, reference = embedders("mean")
    reference.max_seq_length, before = keep, reference.max_seq_length
    expected = reference.encode(list(TEXTS))
    reference.max_seq_length = before
    with open_runtime(folder) as runtime:
        found = runtime.embed(TEXTS, truncate_prompt_tokens=keep)
        assert max(output.num_prompt_tokens for output in found) == keep
        np.testing.assert_allclose(vectors(found), expected, **FP32)


@pytest.mark.parametrize(
    "prefix,changes",
    [
        ("Llama", {}),
        ("Mistral", {"sliding_window": 5}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 16}),
        ("Gemma2", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}),
    ],
)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_encoders_of_every_family_pool_the_states_that_transformers_computes(
    tmp_path, prefix, changes, pooling
):
    folder = save_model(tmp_path, "Model", None, prefix=prefix, **changes)
    model = quietly(transformers_model, folder)
    prompts = [[5, 6, 7], [9], list(range(3, 60))]
    with open_runtime(folder, pooling=pooling, prefill_chunk=11) as runtime:
        assert runtime.tasks == ("embed", "score")
        found = vectors(runtime.embed(prompts, normalize=False))
    for prompt, vector in zip(prompts, found, strict=True):
        with torch.no_grad():
            states = model(torch.tensor([prompt])).last_hidden_state[0]
        expected = {"last": states[-1], "cls": states[0], "mean": states.mean(0)}[pooling]
        np.testing.assert_allclose(vector, expected.numpy(), rtol=1e-5, atol=2e-5)


def transformers_model(folder):
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def test_compiled_vectors_equal_eager_ones(embedders, compile_cache):
    folder, _ = embedders("mean")
    with open_runtime(folder) as runtime:
        expected = vectors(runtime.embed(TEXTS))
    with open_runtime(folder, compile=True, cache_dir=compile_cache) as runtime:
        np.testing.assert_allclose(vectors(runtime.embed(TEXTS)), expected, **FP32)
        assert runtime.stats()["requests"]["finished"] == len(TEXTS)


@pytest.mark.long
@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_of_a_model_in_the_shape_of_smollm2(tmp_path, bbpe_tokenizer, pooling):
    shape = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "initializer_range": 0.02,
    }
    folder = save_embedder(tmp_path, plain(bbpe_tokenizer()), pooling, changes=shape)
    expected = embedder_of(folder).encode(list(TEXTS), batch_size=1)
    with open_runtime(folder, prefill_chunk=19) as runtime:
        np.testing.assert_allclose(vectors(runtime.embed(TEXTS)), expected, **FP32)
