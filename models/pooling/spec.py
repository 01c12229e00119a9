"""What becomes of the hidden states of a prompt where no token is wanted: a vector, classes or a score."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Pooling = Literal["last", "mean", "cls"]
POOLINGS: tuple[Pooling, ...] = ("last", "mean", "cls")
Activation = Literal["none", "sigmoid", "softmax"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
SIMILARITIES: tuple[Similarity, ...] = ("cosine", "dot", "euclidean", "manhattan")
Yields = Literal["vector", "classes", "token_logits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """A projection of pooled vectors: activation(x @ weight.T + bias)."""

    folder: str  # below the checkpoint's, where its tensors lie
    in_features: int
    out_features: int
    bias: bool
    activation: str  # a name of ACTIVATIONS in models/pooling/head.py


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingSpec:
    """How a model pools the hidden states of a prompt, and what it makes of that.

    yields: "vector" is the pooled states behind `dense`; "classes" are the logits of its own head, for each
    of `labels`; "token_logits" is the language model's logit of the last of `token_ids`, less that of the
    first if there are two.
    """

    pooling: Pooling
    yields: Yields = "vector"
    size: int  # numbers of a result before `dimensions` cuts it
    also_generates: bool = False  # whether the model is asked for tokens as well
    dense: tuple[Dense, ...] = ()
    normalize: bool = False  # whether vectors get the length 1
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name, what texts of a kind begin with
    default_prompt: str | None = None  # the name of the one that texts get unless they are given another
    similarity: Similarity = "cosine"
    max_tokens: int | None = None  # of a text, as the checkpoint was trained
    dimensions: tuple[int, ...] = ()  # that vectors may be cut to; empty: any
    labels: tuple[str, ...] = ()
    activation: Activation = "none"  # of classes and of scores that the model makes itself
    token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None  # at the end of a prompt it is no last token
    uses_template: bool = False  # whether texts and pairs are written by the chat template
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # what it reads besides

    @property
    def tasks(self) -> tuple[str, ...]:
        """What may be asked of the model: "generate", "embed", "classify", "score"."""
        own = {
            "vector": ("embed", "score"),
            "classes": ("classify", "score") if self.size == 1 else ("classify",),
            "token_logits": ("score",),
        }[self.yields]
        return ("generate", *own) if self.also_generates else own
