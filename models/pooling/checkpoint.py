"""What a checkpoint says of pooling: modules.json and the folders that it names, config.json, prompts."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...common.errors import ConfigError, LoadError, UnsupportedError, shown
from ..checkpoints.shards import SINGLE_NAME
from ..config import ModelConfig
from ..fields import Fields, read_json, read_json_list
from .derived import CAUSAL, ENCODER, is_classifier
from .spec import POOLINGS, SIMILARITIES, Activation, Dense, Pooling, PoolingSpec

MODULES, PROMPTS, TEXTS = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
OLDER = {  # how 1_Pooling/config.json named each before it had pooling_mode
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
NAMES: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
KNOWN_MODULES = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")
ACTIVATIONS: Mapping[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
OF_PROBLEMS: Mapping[str, Activation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


def read_pooling(folder: Path, model: ModelConfig, asked: Pooling | None) -> PoolingSpec | None:
    """How the model in a folder pools, None for one that only generates; asked: by the caller, beside that.

    Raises UnsupportedError for modules and settings that are not served, by their names, ConfigError for
    values that cannot be, and LoadError for files that are missing or damaged.
    """
    raw = Fields(read_json(folder / "config.json"), str(folder / "config.json"))
    modules = _modules(folder)
    if is_classifier(model.architecture):
        return _classifier(folder, raw, model, modules, asked)
    if "LogitScore" in modules or "classifier_from_token" in raw:
        return _reranker(folder, raw, modules, asked)
    if modules or model.architecture.endswith(ENCODER):
        _refuse_own_code(raw)
        return _embedder(folder, raw, model, modules, asked)
    if asked is None:
        return None
    return PoolingSpec(pooling=asked, size=model.hidden_size, normalize=True, also_generates=True)


def is_embedder(folder: Path, architecture: str) -> bool:
    """Whether a folder holds a model that was saved to make vectors, and may lack its LM head."""
    return os.path.lexists(folder / MODULES) or not architecture.endswith(CAUSAL)


def module_files(folder: Path) -> tuple[str, ...]:
    """The files of the modules that follow a model, relative to its folder; empty without modules.json."""
    found = _modules(folder).values()
    paths = [path for held in found for path in held if path]
    return tuple(f"{path}/{name}" for path in paths for name in ("config.json", SINGLE_NAME))


def _modules(folder: Path) -> dict[str, list[str]]:
    """The folders of each kind of module, in their order; empty without modules.json."""
    if not os.path.lexists(folder / MODULES):
        return {}
    found: dict[str, list[str]] = {}
    for entry in read_json_list(folder / MODULES):
        fields = Fields(entry if isinstance(entry, dict) else {}, str(folder / MODULES))
        kind, path = str(fields.text("type")).rpartition(".")[2], fields.text("path", "")
        if kind not in KNOWN_MODULES:
            raise UnsupportedError(
                f"{fields.origin} has a module of type {shown(kind)}; served are {', '.join(KNOWN_MODULES)}"
            )
        if kind == "Dense" and "Normalize" in found:
            raise UnsupportedError(f"{fields.origin} has Dense behind Normalize; served is Dense before it")
        found.setdefault(kind, []).append(path)
    if found.get("Transformer") != [""]:
        raise UnsupportedError(
            f"{folder / MODULES} has its Transformer in {shown(found.get('Transformer'))}; served is one, in "
            "the folder itself"
        )
    return found


def _refuse_own_code(raw: Fields) -> None:
    """Raise where what a token sees is said by code of the checkpoint's own, which is not read."""
    code = raw.object("auto_map").get("AutoModel")
    if code is not None and raw.values.get("is_causal") is not True:
        raise UnsupportedError(
            f"{raw.origin} names code of its own for this embedder (auto_map: AutoModel {shown(code)}), as "
            "models do whose tokens see those after them, which is not served; if each token sees only "
            'those before it, say so there by "is_causal": true'
        )


def _embedder(
    folder: Path, raw: Fields, model: ModelConfig, modules: Mapping[str, list[str]], asked: Pooling | None
) -> PoolingSpec:
    pooling, size = asked, model.hidden_size
    own = modules.get("Pooling", ["1_Pooling"] if (folder / "1_Pooling").is_dir() else [])
    if own:
        said = _pooling(folder / own[0] / "config.json", size, is_overruled=asked is not None)
        pooling = asked or said
    if pooling is None:
        raise ConfigError(
            f"{folder} says nothing of how {model.architecture} pools (neither {MODULES} nor 1_Pooling); "
            f"wanted pooling= one of {', '.join(POOLINGS)}"
        )
    dense = [_dense(folder, name) for name in modules.get("Dense", [])]
    for each in dense:
        if each.in_features != size:
            raise ConfigError(f"{folder / each.folder} takes {each.in_features} numbers; there are {size}")
        size = each.out_features
    dimensions = raw.token_ids("matryoshka_dimensions")
    return PoolingSpec(
        pooling=pooling,
        size=size,
        dense=tuple(dense),
        normalize="Normalize" in modules or not modules,
        dimensions=tuple(sorted({number for number in dimensions if 0 < number <= size})),
        similarity=_similarity(folder),
        **_texts(folder),
    )


def _classifier(
    folder: Path, raw: Fields, model: ModelConfig, modules: Mapping[str, list[str]], asked: Pooling | None
) -> PoolingSpec:
    _refuse_asked(asked, "gives classes by its last token")
    if wrong := sorted(modules.keys() - {"Transformer"}):
        raise UnsupportedError(f"{folder / MODULES} has {', '.join(wrong)} behind {model.architecture}")
    names = {str(number): str(name) for number, name in raw.object("id2label").items()}
    labels = tuple(names.get(str(number), f"LABEL_{number}") for number in range(model.num_labels))
    return PoolingSpec(
        pooling="last",
        yields="classes",
        size=model.num_labels,
        labels=labels,
        activation=_class_activation(folder, raw, model.num_labels),
        pad_token_id=raw.integer("pad_token_id", None, minimum=0),
        **_texts(folder),
    )


def _reranker(
    folder: Path, raw: Fields, modules: Mapping[str, list[str]], asked: Pooling | None
) -> PoolingSpec:
    _refuse_asked(asked, "scores by its last token")
    if "LogitScore" in modules:
        path = folder / modules["LogitScore"][0] / "config.json"
        fields = Fields(read_json(path), str(path))
        ids = [fields.integer(f"{kind}_token_id", None, minimum=0) for kind in ("false", "true")]
        if ids[1] is None:
            raise fields.error("true_token_id", None, "a token id")
    else:
        ids = [_token_id(folder, text) for text in raw.texts("classifier_from_token")]
        if len(ids) not in (1, 2):
            raise raw.error("classifier_from_token", raw.values["classifier_from_token"], "one token or two")
    return PoolingSpec(
        pooling="last",
        yields="token_logits",
        size=1,
        token_ids=tuple(number for number in ids if number is not None),
        activation=_said_activation(folder, raw) or "sigmoid",
        **_texts(folder),
    )


def _refuse_asked(asked: Pooling | None, does: str) -> None:
    if asked is not None:
        raise ConfigError(f"pooling is {shown(asked)}, and this checkpoint {does}; leave it out")


def _pooling(path: Path, size: int, *, is_overruled: bool) -> Pooling | None:
    fields = Fields(read_json(path), str(path))
    given = fields.integer("embedding_dimension", fields.integer("word_embedding_dimension", size))
    if given != size:
        raise fields.error("embedding_dimension", given, f"hidden_size {size}")
    if not fields.boolean("include_prompt", True):
        raise UnsupportedError(
            f"{path}: include_prompt is false; wanted true: pooling without the prompt's tokens is not served"
        )
    modes = [name for older, name in OLDER.items() if fields.values.get(older)]
    said = fields.values.get("pooling_mode", modes or ["mean"])
    named = [said] if isinstance(said, str) else list(said)
    if len(named) == 1 and named[0] in NAMES:
        return NAMES[named[0]]
    if is_overruled:
        return None
    raise UnsupportedError(
        f"{path}: pooling_mode is {shown(said)}; served is one of {', '.join(NAMES)}; pooling= overrules it"
    )


def _dense(folder: Path, name: str) -> Dense:
    path = folder / name / "config.json"
    fields = Fields(read_json(path), str(path))
    for other in ("module_input_name", "module_output_name"):
        if fields.text(other, "sentence_embedding") != "sentence_embedding":
            raise fields.error(other, fields.values[other], '"sentence_embedding"')
    if fields.boolean("use_residual", False):
        raise UnsupportedError(f"{path}: use_residual is true; wanted false: a residual is not served")
    return Dense(
        folder=name,
        in_features=fields.integer("in_features"),
        out_features=fields.integer("out_features"),
        bias=fields.boolean("bias", True),
        activation=str(fields.text("activation_function", "Tanh")).rpartition(".")[2],
    )


def _similarity(folder: Path) -> Any:
    if not os.path.lexists(folder / PROMPTS):
        return "cosine"
    fields = Fields(read_json(folder / PROMPTS), str(folder / PROMPTS))
    name = fields.text("similarity_fn_name", "cosine")
    if name not in SIMILARITIES:
        raise fields.error("similarity_fn_name", name, f"one of {', '.join(SIMILARITIES)}")
    return name


def _texts(folder: Path) -> dict[str, Any]:
    """What is said of texts before they are tokens: prompts, the most of them, and the chat template."""
    said: dict[str, Any] = {}
    if os.path.lexists(folder / PROMPTS):
        fields = Fields(read_json(folder / PROMPTS), str(folder / PROMPTS))
        prompts = {name: text for name, text in fields.object("prompts").items() if text is not None}
        if not all(isinstance(text, str) for text in prompts.values()):
            raise fields.error("prompts", prompts, "an object of strings")
        default = fields.text("default_prompt_name", None)
        if default is not None and default not in prompts:
            raise fields.error("default_prompt_name", default, f"one of {', '.join(prompts) or 'prompts'}")
        said = {"prompts": prompts, "default_prompt": default}
    if os.path.lexists(folder / TEXTS):
        fields = Fields(read_json(folder / TEXTS), str(folder / TEXTS))
        if fields.boolean("do_lower_case", False):
            raise UnsupportedError(f"{fields.origin}: do_lower_case is true; wanted false")
        template = Fields(fields.object("processing_kwargs"), fields.origin).object("chat_template")
        said["max_tokens"] = fields.integer("max_seq_length", None)
        said["uses_template"] = "message" in fields.object("modality_config")
        said["template_kwargs"] = {
            name: value for name, value in template.items() if name != "restore_suffix"
        }
    return said


def _class_activation(folder: Path, raw: Fields, num_labels: int) -> Activation:
    said = _said_activation(folder, raw)
    if said is not None:
        return said
    problem = raw.text("problem_type", None)
    if problem is None:
        return "sigmoid" if num_labels == 1 else "softmax"
    if problem not in OF_PROBLEMS:
        raise raw.error("problem_type", problem, f"one of {', '.join(OF_PROBLEMS)}")
    return OF_PROBLEMS[problem]


def _said_activation(folder: Path, raw: Fields) -> Activation | None:
    """The activation of scores that a cross encoder was saved with, in any of three places."""
    own = raw.object("sentence_transformers").get("activation_fn")
    name = own or raw.text("sbert_ce_default_activation_function", None)
    if name is None and os.path.lexists(folder / PROMPTS):
        name = Fields(read_json(folder / PROMPTS), str(folder / PROMPTS)).text("activation_fn", None)
    if name is None:
        return None
    found = ACTIVATIONS.get(str(name).rpartition(".")[2])
    if found is None:
        wanted = " or ".join(ACTIVATIONS)
        raise UnsupportedError(f"{folder}: activation_fn is {shown(name)}; served are {wanted}")
    return found


def _token_id(folder: Path, text: str) -> int:
    """The id of a token by its name, which the checkpoint's config gives."""
    path = folder / "tokenizer.json"
    content = read_json(path)
    vocabulary: Any = content.get("model", {}).get("vocab", {})
    entries: Sequence[Any] = content.get("added_tokens", [])
    added = {entry["content"]: entry["id"] for entry in entries if isinstance(entry, dict)}
    found = added.get(text, vocabulary.get(text) if isinstance(vocabulary, dict) else None)
    if not isinstance(found, int):
        raise LoadError(f"classifier_from_token names {shown(text)}, which {path} does not have")
    return found
