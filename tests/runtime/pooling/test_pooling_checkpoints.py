"""What an embedder's files may say, each changed in one place: served as it says, or refused by its name."""

import json
import shutil

import numpy as np
import pytest

from lamina import ConfigError, LaminaError, RequestError, Runtime, UnsupportedError

from ...pooling_models import TEXTS, edit, plain, save_embedder, save_model
from .test_embeddings import open_runtime, vectors


@pytest.fixture(scope="module")
def saved(tmp_path_factory, bbpe_tokenizer):
    return save_embedder(tmp_path_factory.mktemp("embedder"), plain(bbpe_tokenizer()), dense=(24,))


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


@pytest.mark.parametrize(
    "file,values,words",
    [
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "pooling_mode is 'max'"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, "pooling_mode"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
        ("1_Pooling/config.json", {"embedding_dimension": 65}, "embedding_dimension is 65"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.modules.activation.Mish"}, "Mish"),
        ("2_Dense/config.json", {"use_residual": True}, "use_residual"),
        ("2_Dense/config.json", {"in_features": 63}, "63"),
        ("2_Dense/config.json", {"out_features": 23}, "config calls for"),
        ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "module_input_name"),
        ("config.json", {"is_causal": False}, "is_causal"),
        ("config.json", {"auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}, "code of its own"),
        ("config.json", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "hamming"}, "hamming"),
        ("config_sentence_transformers.json", {"default_prompt_name": "none"}, "default_prompt_name"),
        ("config_sentence_transformers.json", {"prompts": {"query": 5}}, "prompts"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(folder, file, values, words):
    edit(folder / file, **values)
    with pytest.raises(LaminaError, match=words):
        open_runtime(folder)


@pytest.mark.parametrize("kind", ["WordEmbeddings", "LSTM", "Router"])
def test_a_module_that_is_not_known_is_refused_by_its_name(folder, kind):
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = f"sentence_transformers.models.{kind}"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UnsupportedError, match=kind):
        open_runtime(folder)


def test_older_names_of_pooling_are_read(folder):
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps(
            {
                "word_embedding_dimension": 64,
                "pooling_mode_lasttoken": True,
                "pooling_mode_mean_tokens": False,
            }
        )
    )
    with open_runtime(folder) as runtime:
        assert runtime._open_input.pooling.pooling == "last"


def test_the_setting_overrules_the_checkpoint(folder):
    edit(folder / "1_Pooling" / "config.json", pooling_mode="max")
    with open_runtime(folder, pooling="cls") as runtime:
        assert runtime._open_input.pooling.pooling == "cls"


def test_sizes_that_a_checkpoint_lists_are_the_only_ones(folder):
    edit(folder / "config.json", matryoshka_dimensions=[8, 16])
    with open_runtime(folder) as runtime:
        assert [len(runtime.embed("a", dimensions=n)[0].numbers()) for n in (8, 16, 24)] == [8, 16, 24]
        with pytest.raises(RequestError, match="cut to 8, 16"):
            runtime.embed("a", dimensions=12)


def test_texts_are_as_long_as_the_checkpoint_says(folder):
    edit(folder / "sentence_bert_config.json", max_seq_length=20)
    with open_runtime(folder) as runtime:
        assert runtime.stats()["resolved"]["max_model_len"] == 20


def test_an_encoder_that_does_not_say_how_it_pools_is_asked_about(tmp_path):
    folder = save_model(tmp_path, "Model", None)
    with pytest.raises(ConfigError, match="pooling= one of last, mean, cls"):
        open_runtime(folder)


def test_tensors_with_and_without_the_prefix_are_found(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    with open_runtime(folder) as runtime:
        expected = vectors(runtime.embed(TEXTS))
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    edit(folder / "config.json", architectures=["LlamaForCausalLM"])
    with open_runtime(folder) as runtime:
        assert runtime.tasks == ("embed", "score")
        np.testing.assert_array_equal(vectors(runtime.embed(TEXTS)), expected)


def test_drafts_and_a_second_way_to_pool_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="speculative"):
        open_runtime(folder, speculative="ngram:2")
    with pytest.raises(ConfigError, match="speculative"):
        Runtime.from_pretrained("folder", pooling="mean", speculative="ngram:2")
    with pytest.raises(ConfigError, match="pooling is 'max'"):
        Runtime.from_pretrained("folder", pooling="max")
    classifier = save_model(tmp_path / "classifier", "ForSequenceClassification", None)
    with pytest.raises(ConfigError, match="pooling is 'mean'"):
        open_runtime(classifier, pooling="mean")
