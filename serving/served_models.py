"""The models of one server, found by the names that clients ask by."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from ..common.errors import ConfigError, LoadError
from .auth.key import Key
from .context import Serving
from .protocol.generation import unknown_model

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

    from .model_swap.swapper import Swapper


class ServedModels:
    """One model or several; the first is meant where a request names none."""

    def __init__(self, servings: Sequence[Serving]) -> None:
        self._servings = tuple(servings)
        self.swapper: Swapper | None = None  # of several models, once they are loaded

    def __iter__(self) -> Iterator[Serving]:
        return iter(self._servings)

    def __len__(self) -> int:
        return len(self._servings)

    @property
    def first(self) -> Serving:
        """The model that is meant where none is named."""
        return self._servings[0]

    @property
    def names(self) -> list[str]:
        """Every name of every model, without adapters."""
        return [name for serving in self for name in serving.config.model_names]

    def find(self, name: str | None) -> Serving:
        """Returns the model of this name, or of a loaded adapter of this name; the first for None.

        Raises ApiError 404 model_not_found for a name that is not served.
        """
        known = self.first if name is None else self.known(name)
        if known is None:
            adapters = [adapter for serving in self for adapter in serving.runtime.input.adapters]
            raise unknown_model(str(name), self.names, is_all=not adapters)
        return known

    async def find_or_load(self, name: str | None) -> Serving:
        """Returns find(name), once installed packages were asked for an adapter of a name that is not known.

        Of several models the first that the adapter fits has it; where it fits none, what the last of them
        says of it is raised.
        """
        if name is None:
            return self.first
        if (known := self.known(name)) is not None:
            return known
        failure: ConfigError | LoadError | None = None
        for serving in self:
            try:
                if await serving.runtime.find_adapter(name):
                    return serving
            except (ConfigError, LoadError) as error:
                failure = error
        if failure is not None:
            raise failure
        return self.find(name)

    def known(self, name: str) -> Serving | None:
        """Returns the model of this name, or of a loaded adapter of this name; None for others."""
        own = (serving for serving in self if name in serving.config.model_names)
        adapted = (serving for serving in self if name in serving.runtime.input.adapters)
        return next(chain(own, adapted), None)

    def holding(self, adapter: str) -> Serving:
        """Returns the model that has a loaded adapter of this name; the first where none has."""
        return next((each for each in self if adapter in each.runtime.input.adapters), self.first)

    async def abort(self, key: Key, request_id: str) -> bool:
        """Ends what this key asked under this id of any model; False where nothing runs."""
        found = [await serving.admission.abort(key, request_id) for serving in self]
        return any(found)


def models_of(request: "HTTPConnection") -> ServedModels:
    """Returns the models of the request's server."""
    models: ServedModels = request.app.state.models
    return models
