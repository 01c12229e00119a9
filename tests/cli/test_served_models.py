"""Models on the command line of `lamina serve`: their names, and options of one of them alone."""

import pytest
import typer
import typer.testing

from lamina.cli import app, options
from lamina.cli.served_models import NamedModel, configs, named_models, own_settings

TWO = [NamedModel(name="a", path="/models/a"), NamedModel(name="q.5", path="org/q")]


def test_a_model_is_called_as_its_folder_file_or_hub_id_is_unless_it_is_named(tmp_path):
    folder, file, odd = tmp_path / "llama", tmp_path / "small.gguf", tmp_path / "x=y"
    folder.mkdir()
    odd.mkdir()
    file.touch()
    words = [str(folder), str(file), "org/model", f"chat={folder}", "code=org/model", str(odd)]
    found = [(model.name, model.path) for model in named_models(words)]
    assert found == [
        ("llama", str(folder)),
        ("small", str(file)),
        ("org/model", "org/model"),
        ("chat", str(folder)),
        ("code", "org/model"),
        ("x=y", str(odd)),
    ]


def test_two_of_a_name_are_refused_with_a_remedy():
    with pytest.raises(typer.BadParameter, match=r"two models are called 'a'; .* NAME=org/a"):
        named_models(["a=org/a", "a=org/b"])


def test_one_model_has_the_options_as_they_are():
    (config,) = configs({"model_names": ["x", "y"], "lora_modules": ["l=/f"], "port": 5}, TWO[:1])
    assert (config.model_names, config.lora_modules, config.port) == (("x", "y"), ("l=/f",), 5)
    (config,) = configs({}, TWO[:1])
    assert config.model_names == ("a",)


def test_of_several_models_each_has_its_names_and_adapters_and_all_the_rest():
    given = {"model_names": ["a=x", "q.5=y", "a=z"], "lora_modules": ["q.5=l=/f"], "port": 5}
    first, second = configs(given, TWO)
    assert (first.model_names, first.lora_modules, first.port) == (("a", "x", "z"), (), 5)
    assert (second.model_names, second.adapters, second.port) == (("q.5", "y"), [("l", "/f")], 5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model_names": ["x"]}, "'x' says of no model that it is its own; wanted MODEL=NAME, of a, q.5"),
        ({"lora_modules": ["l=/f"]}, "wanted MODEL=NAME=FOLDER, of a, q.5"),
    ],
)
def test_what_says_of_no_model_that_it_is_its_own_is_refused(given, words):
    with pytest.raises(typer.BadParameter, match=words):
        configs(given, TWO)


def test_settings_of_one_model_have_their_types():
    words = ["a.max_model_len=64", "q.5.memory-fraction=0.5", "a.prefix_cache=False", "a.lora=8:16"]
    found = own_settings(words, TWO, options.OF_MODELS)
    assert found == {
        "a": {"max_model_len": 64, "prefix_cache": False, "lora": "8:16"},
        "q.5": {"memory_fraction": 0.5},
    }


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("max_model_len=64", "wanted MODEL.SETTING=VALUE, of a, q.5"),
        ("b.max_model_len=64", "wanted MODEL.SETTING=VALUE, of a, q.5"),
        ("a.max_model_len", "wanted MODEL.SETTING=VALUE, of a, q.5"),
        ("a.port=5", "'port' is no setting of one model alone"),
        ("a.compile=False", "'compile' is no setting of one model alone"),
        ("a.max_model_len=many", "'many'; wanted a value of type int"),
        ("a.prefix_cache=maybe", "'maybe'; wanted true or false"),
    ],
)
def test_a_setting_that_cannot_be_of_one_model_is_refused(word, words):
    with pytest.raises(typer.BadParameter, match=words):
        own_settings([word], TWO, options.OF_MODELS)


def test_it_is_said_before_anything_is_loaded(tmp_path):
    result = typer.testing.CliRunner().invoke(app, ["serve", "a=org/a", "b=org/b", "--model-names", "x"])
    assert result.exit_code == 2
    assert "says of no model" in result.output
