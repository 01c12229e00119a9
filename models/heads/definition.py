"""What a head that drafts is to Lamina: a model that takes states of its target beside each token."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...common.errors import ConfigError, UnsupportedError, shown
from ..config import ModelConfig
from ..layers import Attend, Ops
from ..registry import Forward, ModelDefinition

STATES = "%states"  # among a head's weights: what it is given of each token, [T, H]


class Combine(Protocol):
    """What a head goes on from, [n, H of the head], of the target's states [n, columns]."""

    def __call__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], states: Tensor, ops: Ops
    ) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """What only the config of a head has, and how its checkpoint names and leaves out tensors."""

    draft_vocab_size: int  # ids that it can draft
    target_hidden_size: int
    layers_read: tuple[int, ...] | None = None  # whose residual sums it is given; None: by the target's depth
    norm_before_residual: bool = False  # whether the first residual is the normed states
    norm_before_fc: bool = False  # whether the target's states are normed before they are combined
    norm_output: bool = False  # whether the states that it goes on from are normed
    prefix: str = ""  # of its tensors' names
    first_layer: str = "layers.0"  # what the checkpoint calls it
    fc_bias: bool = False
    has_embedding: bool = False  # else the target's serves
    has_lm_head: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadDefinition(ModelDefinition):
    """A head as pure functions of its config; its forward finds its states in weights[STATES].

    It returns the states [T, H] that it goes on from at the next token, of which `logits` makes scores.
    """

    combine: Combine
    layers_read: Callable[[ModelConfig, ModelConfig], tuple[int, ...]]  # of head and target: residual sums


def head_config(config: ModelConfig) -> HeadConfig:
    """What of a config only heads have."""
    assert isinstance(config.own, HeadConfig), "a head whose config is a model's"
    return config.own


def with_residuals(forward: Forward, layers: tuple[int, ...]) -> Forward:
    """The same, with the residual sums that these layers begin with as further columns: [T, H + n * H].

    The number of layers stands for the sum that the final norm takes. Raises UnsupportedError where the model
    does not show one of them.
    """
    if not layers:
        return forward

    def wide(
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        ops: Ops,
    ) -> Tensor:
        shown_: dict[int, Tensor] = {}

        def show(layer: int, residual: Tensor) -> None:
            if layer in layers:
                shown_[layer] = residual

        hidden = forward(config, weights, token_ids, positions, attend, ops._replace(show_residual=show))
        if len(shown_) < len({*layers}):
            raise UnsupportedError(
                f"{config.architecture} shows no residual sums of layers {layers}, which the head is given; "
                "its forward is to call ops.show_residual before every layer"
            )
        return torch.cat((hidden, *[shown_[layer] for layer in layers]), dim=-1)

    return wide


def check_head(head: ModelConfig, definition: HeadDefinition, target: ModelConfig) -> None:
    """Raise ConfigError, with both figures, where a head was trained for another target than this."""
    own = head_config(head)
    pairs = [
        ("hidden_size of the target", own.target_hidden_size, target.hidden_size),
        ("vocab_size", head.vocab_size, target.vocab_size),
    ]
    if not own.has_embedding:
        pairs.append(
            ("hidden_size, as it has no embedding of its own,", head.hidden_size, target.hidden_size)
        )
    if not own.has_lm_head:
        pairs.append(("hidden_size, as it has no LM head of its own,", head.hidden_size, target.hidden_size))
    for what, wanted, got in pairs:
        if wanted != got:
            raise ConfigError(
                f"the head is made for a {what} of {wanted}, and {target.architecture} has {got}; "
                "wanted a head that was trained for this model"
            )
    layers = definition.layers_read(head, target)
    if any(not 0 <= layer <= target.num_layers for layer in layers):
        raise ConfigError(
            f"the head is given the residual sums of layers {shown(layers)}, and {target.architecture} has "
            f"{target.num_layers} layers; wanted a head that was trained for this model"
        )
