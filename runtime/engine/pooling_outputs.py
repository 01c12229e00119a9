"""What callers get back of texts that were pooled: vectors, classes and scores."""

import array
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...common.errors import RequestError
from ...models.pooling.spec import Similarity
from .outputs import RequestOutput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingOutput:
    """The vector of a text; `data` is it in float32, the lowest byte of each number first."""

    data: bytes
    num_prompt_tokens: int
    num_cached_tokens: int = 0

    @property
    def embedding(self) -> "NDArray[np.float32]":
        """The vector [dimensions], not to be written."""
        import numpy as np  # which a server's own process does without

        return np.frombuffer(self.data, "<f4")

    def numbers(self) -> list[float]:
        """Returns the vector as a list."""
        return floats(self.data)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassificationOutput:
    """How likely each class of a text is, or its logits where that was asked; `label` is the likeliest's."""

    label: str
    probs: tuple[float, ...]
    num_prompt_tokens: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreOutput:
    """How well a document answers a query: the higher the better."""

    index: int  # of the document
    score: float
    num_prompt_tokens: int  # of the pair, or of the document with its query
    num_cached_tokens: int = 0


def floats(data: bytes) -> list[float]:
    """Returns numbers in float32, the lowest byte of each first."""
    numbers = array.array("f", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def result_of(output: RequestOutput) -> bytes:
    """Returns what came of a text. RequestError where it was ended before, as by its timeout."""
    (answer,) = output.outputs
    if answer.pooled is None:
        why = "its time was up" if answer.stop_reason == "deadline" else "it was aborted"
        raise RequestError(f"the text of request {output.request_id} has no result: {why}")
    return answer.pooled


def embedding_of(output: RequestOutput) -> EmbeddingOutput:
    """Returns the vector of a text."""
    return EmbeddingOutput(data=result_of(output), **counts_of(output))


def classification_of(output: RequestOutput, labels: Sequence[str]) -> ClassificationOutput:
    """Returns the classes of a text."""
    probs = tuple(floats(result_of(output)))
    likeliest = max(range(len(probs)), key=probs.__getitem__)
    return ClassificationOutput(label=labels[likeliest], probs=probs, **counts_of(output))


def counts_of(output: RequestOutput) -> dict[str, Any]:
    """Returns the tokens of a text, and how many of them were in the prefix cache."""
    return {
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
    }


def similarity(kind: Similarity, first: bytes, second: bytes) -> float:
    """Returns how near two vectors are by that measure; of distances the negative, so that more is nearer."""
    one, other = floats(first), floats(second)
    if kind == "euclidean":
        return -math.dist(one, other)
    if kind == "manhattan":
        return -math.fsum(abs(a - b) for a, b in zip(one, other, strict=True))
    product = math.fsum(a * b for a, b in zip(one, other, strict=True))
    if kind == "dot":
        return product
    return product / max(math.hypot(*one) * math.hypot(*other), sys.float_info.min)
