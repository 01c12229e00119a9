"""Definitions of models without an LM head, made of those with one: encoders and classifiers."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..config import ModelConfig
from ..fields import Fields
from ..layers import Ops
from ..registry import ModelDefinition, ParameterSpec

CAUSAL, ENCODER, CLASSIFIER = "ForCausalLM", "Model", "ForSequenceClassification"
PREFIX = "model."  # of the names of an LM's tensors, which a model saved without its head lacks
SCORE = "score"
DEFAULT_NUM_LABELS = 2  # where config.json says nothing, as in transformers


def causal_name(architecture: str) -> str | None:
    """The architecture with an LM head that this one is without; None where it is not such a one."""
    for suffix in (CLASSIFIER, ENCODER):
        if architecture.endswith(suffix):
            return architecture.removesuffix(suffix) + CAUSAL
    return None


def is_classifier(architecture: str) -> bool:
    """Whether an architecture is one that gives a sequence classes."""
    return architecture.endswith(CLASSIFIER)


def derived(architecture: str, causal: ModelDefinition) -> ModelDefinition:
    """The definition of an encoder or a classifier of sequences, of the model with an LM head."""
    if is_classifier(architecture):
        return replace(
            causal,
            parameters=lambda config: _without_head(causal.parameters(config)) | {SCORE: _score(config)},
            logits=_class_logits,
            config=_with_labels(causal.config),
        )
    return replace(causal, parameters=lambda config: _without_head(causal.parameters(config)))


def as_stored(definition: ModelDefinition, architecture: str, names: Collection[str]) -> ModelDefinition:
    """The same with the parameters that an embedder's checkpoint holds, by the names of its tensors.

    Those saved without their LM head have no `model.` before them; an LM head may be missing.
    """
    is_bare = not any(name.startswith(PREFIX) for name in names)
    lacks_head = architecture.endswith(CAUSAL) and "lm_head.weight" not in names
    if not is_bare and not lacks_head:
        return definition

    def parameters(config: ModelConfig) -> Mapping[str, ParameterSpec]:
        specs = definition.parameters(config)
        held = _without_head(specs) if lacks_head else specs
        return {name: _bare(spec) if is_bare else spec for name, spec in held.items()}

    return replace(definition, parameters=parameters)


def _bare(spec: ParameterSpec) -> ParameterSpec:
    return replace(spec, sources=tuple(source.removeprefix(PREFIX) for source in spec.sources))


def _without_head(specs: Mapping[str, ParameterSpec]) -> dict[str, ParameterSpec]:
    return {name: spec for name, spec in specs.items() if name != "lm_head"}


def _score(config: ModelConfig) -> ParameterSpec:
    return ParameterSpec(shape=(config.num_labels, config.hidden_size), sources=("score.weight",))


def _class_logits(config: ModelConfig, weights: Mapping[str, Tensor], hidden: Tensor, ops: Ops) -> Tensor:
    """Logits [n, labels] of hidden states [n, H]."""
    return ops.linear(hidden, weights[SCORE])


def _with_labels(
    config: Callable[[Fields], Mapping[str, Any]],
) -> Callable[[Fields], Mapping[str, Any]]:
    def read(fields: Fields) -> Mapping[str, Any]:
        return {**config(fields), "num_labels": num_labels(fields)}

    return read


def num_labels(fields: Fields) -> int:
    """How many classes a config.json names."""
    named = len(fields.object("id2label"))
    return int(fields.integer("num_labels", named or DEFAULT_NUM_LABELS))
