"""What a core says of itself once it is ready, as plain data: enough to make an input processor elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...models.generation_config import GenerationDefaults
from ...models.pooling.spec import PoolingSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreDescription:
    """A model that is loaded and ready to step, as those who check and write requests for it know it."""

    model: str  # as the caller named it
    folder: str  # of the checkpoint, where its tokenizer lies unless the caller named another
    device: str  # "cpu", "cuda:0"
    defaults: GenerationDefaults
    generation_defaults: bool  # whether the checkpoint's defaults count in chats, too
    eos_token_ids: tuple[int, ...]  # every id that ends an answer, sorted
    vocab_size: int
    num_valid_ids: int  # ids from here on are padding of the vocabulary
    max_model_len: int  # tokens of prompt and answer
    declared_len: int | None  # positions that the checkpoint declares
    capacity_tokens: int  # of the KV cache
    seed: int  # of requests that bring none
    pooling: PoolingSpec | None = None  # how it makes vectors, classes or scores; None: it only generates
    max_loras: int = 0  # adapters of a step; 0: requests can name none
    settings: Mapping[str, Any]  # those in force, as Runtime.stats()["resolved"]
