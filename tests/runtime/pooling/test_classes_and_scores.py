"""Classes and scores equal those of transformers and of sentence-transformers' cross encoders."""

import shutil

import numpy as np
import pytest
import torch
import transformers

from lamina import LoadError, LogitsError, RequestError, SamplingParams, UnsupportedError
from lamina.runtime.engine.pooling_processor import TextOptions
from lamina.runtime.request_options import RequestOptions

from ...pooling_models import (
    cross_encoder_of,
    edit,
    plain,
    quietly,
    save_embedder,
    save_model,
    save_reranker,
)
from .test_embeddings import FP32, SCHEDULES, open_runtime, vectors

PROMPTS = [[5, 6, 7], [9], list(range(3, 60)), [4, 0, 8, 0, 0], [0, 0]]
PAIRS = [("hello world", "the the"), ("hello", "b"), ("he said", "x" * 50)]


def logits_of(folder, prompts):
    """transformers' own, in one padded batch: so it has to find the last token that is no padding."""
    kind = transformers.AutoModelForSequenceClassification
    model = quietly(kind.from_pretrained, folder, dtype=torch.float32, attn_implementation="eager").eval()
    longest = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    with torch.no_grad():
        return model(ids).logits.numpy()


@pytest.mark.parametrize("schedule", ["whole", "chunks", "preempted"])
@pytest.mark.parametrize(
    "prefix,changes",
    [
        ("Llama", {"num_labels": 2}),
        ("Mistral", {"num_labels": 4, "sliding_window": None}),
        ("Qwen2", {"num_labels": 1}),
        ("Qwen3", {"num_labels": 3, "head_dim": 16}),
    ],
)
def test_classes_equal_those_of_transformers(tmp_path, prefix, changes, schedule):
    folder = save_model(tmp_path, "ForSequenceClassification", None, prefix=prefix, **changes)
    expected = logits_of(folder, PROMPTS)
    with open_runtime(folder, **SCHEDULES[schedule]) as runtime:
        assert runtime.tasks == (("classify", "score") if changes["num_labels"] == 1 else ("classify",))
        raw = [output.probs for output in runtime.classify(PROMPTS, activation=False)]
        np.testing.assert_allclose(raw, expected, rtol=1e-5, atol=1e-5)
        found = runtime.classify(PROMPTS)
        wide = torch.tensor(expected, dtype=torch.float64)
        probs = wide.sigmoid() if wide.shape[1] == 1 else wide.softmax(-1)
        np.testing.assert_allclose([output.probs for output in found], probs.numpy(), **FP32)
        for output, row in zip(found, expected, strict=True):
            assert output.label == f"LABEL_{row.argmax()}"


@pytest.mark.parametrize(
    "problem,activation",
    [
        ("regression", "none"),
        ("multi_label_classification", "sigmoid"),
        ("single_label_classification", "softmax"),
    ],
)
def test_the_kind_of_problem_says_what_logits_become(tmp_path, problem, activation):
    folder = save_model(tmp_path, "ForSequenceClassification", None, num_labels=3)
    edit(folder / "config.json", problem_type=problem)
    logits = torch.tensor(logits_of(folder, PROMPTS), dtype=torch.float64)
    made = {"none": logits, "sigmoid": logits.sigmoid(), "softmax": logits.softmax(-1)}
    with open_runtime(folder) as runtime:
        found = [output.probs for output in runtime.classify(PROMPTS)]
    np.testing.assert_allclose(found, made[activation].numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_template", [True, False])
def test_scores_equal_those_of_a_cross_encoder_with_token_logits(tmp_path, bbpe_tokenizer, has_template):
    tokenizer = bbpe_tokenizer() if has_template else plain(bbpe_tokenizer())
    folder = save_reranker(tmp_path, tokenizer)
    expected = cross_encoder_of(folder).predict(PAIRS)
    queries, documents = ([pair[place] for pair in PAIRS] for place in (0, 1))
    with open_runtime(folder, prefill_chunk=7) as runtime:
        assert runtime.tasks == ("score",)
        np.testing.assert_allclose(
            [each.score for each in runtime.score(queries, documents)], expected, **FP32
        )
        raw = [each.score for each in runtime.score(queries, documents, activation=False)]
        np.testing.assert_allclose(1 / (1 + np.exp(-np.array(raw))), expected, **FP32)
        alone = runtime.score(PAIRS[1][0], PAIRS[1][1])
        assert (alone[0].index, len(alone)) == (0, 1)


def test_scores_equal_those_of_a_cross_encoder_with_one_class(tmp_path, bbpe_tokenizer):
    folder = save_model(tmp_path, "ForSequenceClassification", plain(bbpe_tokenizer()), num_labels=1)
    expected = cross_encoder_of(folder).predict(PAIRS, batch_size=1)
    queries, documents = ([pair[place] for pair in PAIRS] for place in (0, 1))
    with open_runtime(folder) as runtime:
        np.testing.assert_allclose(
            [each.score for each in runtime.score(queries, documents)], expected, **FP32
        )


def test_tokens_that_a_config_names_score_as_their_logits_do(tmp_path, bbpe_tokenizer):
    folder = save_model(tmp_path, "ForCausalLM", plain(bbpe_tokenizer()))
    edit(folder / "config.json", classifier_from_token=["b", "hello"])
    model = quietly(transformers.LlamaForCausalLM.from_pretrained, folder).eval()
    tokenizer = bbpe_tokenizer()
    ids = tokenizer("hello world", "the")["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    no, yes = tokenizer.convert_tokens_to_ids(["b", "hello"])
    with open_runtime(folder) as runtime:
        (found,) = runtime.score("hello world", ["the"], activation=False)
    assert found.score == pytest.approx(float(logits[yes] - logits[no]), abs=1e-4)
    edit(folder / "config.json", classifier_from_token=["b", "no such token"])
    with pytest.raises(LoadError, match="no such token"):
        open_runtime(folder)


def test_a_language_model_makes_vectors_beside_answers_in_the_same_steps(tiny_text_folder, tiny_reference):
    model = tiny_reference(tiny_text_folder)
    params = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    with open_runtime(tiny_text_folder, pooling="mean", prefill_chunk=9) as runtime:
        assert runtime.tasks == ("generate", "embed", "score")
        alone = runtime.generate([[5, 6], [7, 8, 9]], SamplingParams(**params))
        asked = [*runtime._pooling.embed(PROMPTS, *options(), normalize=False)]
        both = [
            *runtime._open_input.prepare_each([[5, 6], [7, 8, 9]], SamplingParams(**params), options()[1])
        ]
        submissions = [each.submissions[0] for each in (both[0], *asked, both[1])]
        runtime._client.run(submissions)
        assert [each.output().outputs[0].token_ids for each in both] == [
            o.outputs[0].token_ids for o in alone
        ]
        found = runtime._pooling.embeddings([each.output() for each in asked])
        assert runtime.stats()["blocks"]["used"] == 0
    for prompt, vector in zip(PROMPTS, vectors(found), strict=True):
        with torch.no_grad():
            states = model.model(torch.tensor([prompt])).last_hidden_state[0]
        np.testing.assert_allclose(vector, states.mean(0).numpy(), rtol=1e-5, atol=1e-5)


def options():
    return TextOptions(), RequestOptions()


def test_the_longest_text_has_as_many_tokens_as_the_model_has_positions(tiny_folder):
    with open_runtime(tiny_folder, pooling="last", max_model_len=24) as runtime:
        assert runtime.embed([list(range(3, 27))])[0].num_prompt_tokens == 24
        with pytest.raises(RequestError, match="at most 24"):
            runtime.embed([list(range(3, 28))])
        (cut,) = runtime.embed([list(range(3, 40))], truncate_prompt_tokens=-1)
        assert cut.num_prompt_tokens == 24


def test_last_tokens_reuse_the_prefix_cache_and_means_do_not(tiny_folder):
    prompt = list(range(3, 60))
    for pooling, hits in (("last", 56), ("mean", 0), ("cls", 0)):
        with open_runtime(tiny_folder, pooling=pooling, block_size=8) as runtime:
            first, second = (runtime.embed([prompt])[0] for _ in range(2))
            assert (first.num_cached_tokens, second.num_cached_tokens) == (0, hits)
            np.testing.assert_allclose(first.embedding, second.embedding, **FP32)


def test_results_that_are_no_numbers_end_their_text_alone(tmp_path, tiny_folder):
    folder = tmp_path / "broken"
    shutil.copytree(tiny_folder, folder)
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with open_runtime(folder, pooling="last", prefix_cache=False) as runtime:
        with pytest.raises(LogitsError, match="not finite"):
            runtime.embed([[5, 6], [7]])
        assert np.isfinite(runtime.embed([[5, 6]])[0].embedding).all()


@pytest.mark.parametrize(
    "given,words",
    [
        ({"dimensions": 65}, "dimensions is 65"),
        ({"dimensions": 0}, "dimensions is 0"),
        ({"dimensions": 2.5}, "dimensions is 2.5"),
        ({"dimensions": True}, "dimensions is True"),
        ({"normalize": 1}, "normalize is 1"),
        ({"prompt_name": "query"}, "prompt_name is 'query'"),
        ({"prompt": 5}, "prompt is 5"),
        ({"prompt": "a", "prompt_name": "b"}, "both given"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens is -2"),
        ({"timeout": -1}, "timeout is -1"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(tiny_text_folder, given, words):
    with open_runtime(tiny_text_folder, pooling="mean") as runtime, pytest.raises(RequestError, match=words):
        runtime.embed("hello", **given)


@pytest.mark.parametrize("texts", [[], "", [[]], [["a"]], [None], 5, [[320]], [[-1]], ["a", [1, "b"]], b"a"])
def test_what_is_no_text_is_refused(tiny_text_folder, texts):
    with open_runtime(tiny_text_folder, pooling="mean") as runtime:
        if texts == "":
            assert runtime.embed(texts)[0].num_prompt_tokens == 1  # its BOS
            return
        with pytest.raises(RequestError):
            runtime.embed(texts)


def test_a_task_that_is_not_the_models_is_refused_by_name(tiny_text_folder, tmp_path, bbpe_tokenizer):
    with open_runtime(tiny_text_folder) as runtime:
        for call in (runtime.embed, runtime.classify):
            with pytest.raises(UnsupportedError, match="it serves generate"):
                call("hello")
        with pytest.raises(UnsupportedError, match="does not score"):
            runtime.score("a", "b")
    folder = save_embedder(tmp_path, plain(bbpe_tokenizer()))
    with open_runtime(folder) as runtime:
        with pytest.raises(UnsupportedError, match="does not generate; it serves embed, score"):
            runtime.generate("hello")
        with pytest.raises(UnsupportedError, match="does not classify"):
            runtime.classify("hello")
        with pytest.raises(UnsupportedError, match="does not generate"):
            runtime.chat([{"role": "user", "content": "hello"}])
        with pytest.raises(UnsupportedError, match="does not generate"):
            runtime.beam_search("hello")
        runtime.warm_up()
