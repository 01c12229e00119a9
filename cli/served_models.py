"""The models of `lamina serve` by their names, and the options that are of one of several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .fields import Field

if TYPE_CHECKING:
    from ..serving.config import ServeConfig

TYPES = {"int": int, "float": float, "str": str}
FLAGS = {"true": True, "false": False}
OF_ONE = ("model_names", "lora_modules")  # options that are of one model, with its name before them


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedModel:
    """A model to serve, and what it is called."""

    name: str
    path: str  # a folder, a file or a hub id


def named_models(words: Sequence[str]) -> list[NamedModel]:
    """Returns the models of NAME=MODEL or MODEL, which is then called as its folder, file or hub id is.

    Raises typer.BadParameter where two have the same name.
    """
    models = [_named(word) for word in words]
    names = [model.name for model in models]
    twice = next((model for model in models if names.count(model.name) > 1), None)
    if twice is not None:
        message = f"two models are called {twice.name!r}; wanted a name for each, as NAME={twice.path}"
        raise typer.BadParameter(message, param_hint="MODEL")
    return models


def configs(given: Mapping[str, Any], models: Sequence[NamedModel]) -> "list[ServeConfig]":
    """Returns the checked config of each model, of the options of ServeConfig that were given.

    Of several models, names and adapters are each of the one that is named before them.
    """
    from ..serving.config import ServeConfig

    if len(models) == 1:
        return [ServeConfig(**{"model_names": (models[0].name,), **given})]
    shared = {name: value for name, value in given.items() if name not in OF_ONE}
    aliases, adapters = (_by_model(option, given.get(option) or (), models) for option in OF_ONE)
    return [
        ServeConfig(
            model_names=(model.name, *aliases[model.name]), lora_modules=adapters[model.name], **shared
        )
        for model in models
    ]


def own_settings(
    words: Sequence[str], models: Sequence[NamedModel], fields: Sequence[Field]
) -> dict[str, dict[str, Any]]:
    """Returns the settings of each model by its name, of MODEL.SETTING=VALUE.

    fields: those of RuntimeConfig that are options. Raises typer.BadParameter for other models and settings,
    and for what is no value of that type.
    """
    found: dict[str, dict[str, Any]] = {model.name: {} for model in models}
    for word in words:
        head, equals, value = word.partition("=")
        name, _, setting = head.rpartition(".")
        field = next((each for each in fields if each.name == setting.replace("-", "_")), None)
        if not equals or name not in found:
            raise _refused("model_setting", word, "MODEL.SETTING=VALUE", models)
        if field is None:
            wanted = "one that is an option, as max_model_len"
            message = f"{setting!r} is no setting of one model alone; wanted {wanted}"
            raise typer.BadParameter(message, param_hint="--model-setting")
        found[name][field.name] = _value(word, field, value)
    return found


def _named(word: str) -> NamedModel:
    name, equals, path = word.partition("=")
    if equals and name and path and "/" not in name and not Path(word).exists():
        return NamedModel(name=name, path=path)
    where = Path(word)
    name = where.resolve().name.removesuffix(".gguf") if where.exists() else word
    return NamedModel(name=name, path=word)


def _by_model(option: str, words: Sequence[str], models: Sequence[NamedModel]) -> dict[str, tuple[str, ...]]:
    """What is given of each model, by MODEL=; typer.BadParameter for what names none."""
    found: dict[str, tuple[str, ...]] = {model.name: () for model in models}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in found:
            wanted = "MODEL=NAME" if option == "model_names" else "MODEL=NAME=FOLDER"
            raise _refused(option, word, wanted, models)
        found[name] += (value,)
    return found


def _refused(option: str, word: str, wanted: str, models: Sequence[NamedModel]) -> typer.BadParameter:
    names = ", ".join(model.name for model in models)
    return typer.BadParameter(
        f"{word!r} says of no model that it is its own; wanted {wanted}, of {names}",
        param_hint=f"--{option.replace('_', '-')}",
    )


def _value(word: str, field: Field, value: str) -> Any:
    """A setting's value as its type is; typer.BadParameter for a text that is none."""
    kind = field.type.split(" |")[0]
    try:
        return FLAGS[value.lower()] if kind == "bool" else TYPES.get(kind, str)(value)
    except (KeyError, ValueError):
        wanted = "true or false" if kind == "bool" else f"a value of type {kind}"
        message = f"{word!r} has {value!r}; wanted {wanted}"
        raise typer.BadParameter(message, param_hint="--model-setting") from None
