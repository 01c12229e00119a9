"""Ctrl-C in code that a request brought along: data, so that it can cross from the worker to the engine."""

from ...common.errors import LaminaError


class InterruptAtRequestError(KeyboardInterrupt):
    """Ctrl-C in code of a request's own: it ends that request, and the wait of whoever steps."""

    def __init__(self, request_id: str, failure: LaminaError) -> None:
        super().__init__(request_id)
        self.request_id = request_id
        self.failure = failure
