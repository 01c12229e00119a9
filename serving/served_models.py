"""The models of one server, found by the names that clients ask by."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from ..common.errors import ConfigError, LoadError
from .admission.connection import while_connected
from .admission.lease import request_timeout
from .auth.key import Key, key_of
from .auth.limits import retry_after, spoken
from .context import Serving
from .errors import ApiError
from .protocol.generation import unknown_model

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection, Request

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
        """Returns the model of this name, or of an adapter of this name; the first for None.

        Raises ApiError 404 model_not_found for a name that is not served.
        """
        known = self.first if name is None else self.known(name)
        if known is None:
            adapters = [adapter for serving in self for adapter in serving.adapter_names]
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
            if serving.loaded is None:
                continue
            try:
                if await serving.runtime.find_adapter(name):
                    return serving
            except (ConfigError, LoadError) as error:
                failure = error
        if failure is not None:
            raise failure
        return self.find(name)

    def known(self, name: str) -> Serving | None:
        """Returns the model of this name, or of an adapter of this name; None for others."""
        own = (serving for serving in self if name in serving.config.model_names)
        adapted = (serving for serving in self if name in serving.adapter_names)
        return next(chain(own, adapted), None)

    def holding(self, adapter: str) -> Serving:
        """Returns the model that has a loaded adapter of this name; the first where none has."""
        return next((each for each in self if adapter in each.adapter_names), self.first)

    async def abort(self, key: Key, request_id: str) -> bool:
        """Ends what this key asked under this id of any model; False where nothing runs."""
        loaded = [serving for serving in self if serving.loaded is not None]
        found = [await serving.admission.abort(key, request_id) for serving in loaded]
        return any(found)


def models_of(request: "HTTPConnection") -> ServedModels:
    """Returns the models of the request's server."""
    models: ServedModels = request.app.state.models
    return models


async def require_loaded(request: "Request", serving: Serving, name: str) -> None:
    """Returns once a model that is loaded when it is first asked is loaded, which it is for its turn.

    name: as it is asked by. Raises ApiError: 403 for a key that may not ask it, 429 where that takes longer
    than the request may wait, 503 where it cannot be loaded, 499 once the client has gone.
    """
    swapper = models_of(request).swapper
    if serving.loaded is not None or swapper is None:
        return
    key_of(request).require_model(name)
    most = min(request_timeout(request.headers), serving.config.max_queue_seconds)
    try:
        async with asyncio.timeout(most):
            await while_connected(request.receive, swapper.load(serving.config.model_names[0]))
    except TimeoutError:
        message = f"the request has waited {spoken(most)} for its model to be loaded, as long as it may"
        raise ApiError(status=429, message=message, code="queue_full", headers=retry_after(5)) from None
