"""The definition of a model that is served, and how it pools: by its checkpoint and the settings."""

from pathlib import Path

from ...common.errors import ConfigError, shown
from ...models.checkpoints.shards import tensor_headers
from ...models.config import ModelConfig
from ...models.pooling.checkpoint import is_embedder, read_pooling
from ...models.pooling.derived import as_stored
from ...models.pooling.head import check_dense
from ...models.pooling.spec import PoolingSpec
from ...models.registry import ModelDefinition, find_model
from ..config import RuntimeConfig
from .drafting import refuse_head


def definition_of(folder: Path, model: ModelConfig, *, is_dummy: bool) -> ModelDefinition:
    """The model's definition, of an embedder by the tensors that its checkpoint has.

    Raises ConfigError for a head in the place of a model.
    """
    definition = find_model(model.architecture)
    refuse_head(definition, folder)
    if is_dummy or not is_embedder(folder, model.architecture):
        return definition
    names = {name for held in tensor_headers(folder).values() for name in held}
    return as_stored(definition, model.architecture, names)


def pooling_of(config: RuntimeConfig, folder: Path, model: ModelConfig) -> PoolingSpec | None:
    """How the model pools, None for one that only generates.

    Raises ConfigError where the settings ask for what it cannot do, UnsupportedError for what is not served.
    """
    pooling = read_pooling(folder, model, None if config.pooling == "auto" else config.pooling)
    if pooling is not None:
        check_dense(pooling.dense)
        if config.speculative is not None:
            raise ConfigError(
                f"speculative is {shown(config.speculative)}, and drafts beside pooled prompts are not "
                "served; leave it out"
            )
    return pooling
