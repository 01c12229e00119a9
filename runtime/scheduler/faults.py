"""Errors that come while one request is seen to: they say at which, so that it can end alone."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from .request import Request

P = ParamSpec("P")
R = TypeVar("R")


class FaultError(Exception):
    """Something failed at one request; the cause says what."""

    def __init__(self, request: Request) -> None:
        super().__init__(request.request_id)
        self.request = request


def at_request(
    method: Callable[Concatenate[Any, Request, P], R],
) -> Callable[Concatenate[Any, Request, P], R]:
    """A method that sees to one request, its first argument, whose error then says so."""

    def seen_to(self: Any, request: Request, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, request, *args, **kwargs)
        except FaultError:
            raise
        except Exception as error:
            raise FaultError(request) from error

    functools.update_wrapper(seen_to, method)
    return seen_to


def blamed(error: Exception) -> tuple[Request | None, BaseException]:
    """At which request an error came, None where nothing says so, and the error itself."""
    if isinstance(error, FaultError):
        return error.request, error.__cause__ or error
    return None, error
