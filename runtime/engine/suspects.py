"""Who a fault of unknown origin is due to: the step is tried again, and then requests one at a time."""

from collections.abc import Iterable

from ..scheduler.request import Request


class Suspects:
    """Requests that ran when a step failed, until each has got a further token or has ended.

    If another step fails before that, they are computed alone, one after another: who fails alone is the one.
    """

    def __init__(self) -> None:
        self._num_tokens: dict[Request, int] = {}  # that each had when the step failed
        self.alone: Request | None = None  # the only one to be computed

    def __bool__(self) -> bool:
        return bool(self._num_tokens)

    def accuse(self, requests: Iterable[Request]) -> Request | None:
        """Notes that a step failed that these had a part in; returns whose fault it was, None if unknown."""
        culprit = self.alone
        if culprit is None:
            is_second = bool(self._num_tokens)
            self._num_tokens |= {request: request.num_tokens for request in requests}
            if not is_second:
                return None
        else:
            self._num_tokens.pop(culprit, None)
        self.alone = next(iter(self._num_tokens), None)
        return culprit

    def clear_innocent(self) -> bool:
        """Notes that a step went well; returns whether another one, or everybody, is to be computed now."""
        for request, num_tokens in [*self._num_tokens.items()]:
            if request.finish_reason is not None or request.num_tokens > num_tokens:
                del self._num_tokens[request]
        if self.alone is None or self.alone in self._num_tokens:
            return False
        self.alone = next(iter(self._num_tokens), None)
        return True
