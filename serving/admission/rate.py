"""How fast the engine answers, measured from what it sends: from it follows how long a queue takes."""

from collections.abc import Sequence

from ...runtime.protocol.engine_output import EngineOutput

WINDOW = 0.5  # seconds of work that make one measurement
WEIGHT = 0.3  # of what is new, in moving averages


class Rate:
    """Moving averages of tokens a second while the engine works, and of tokens an answer."""

    def __init__(self) -> None:
        self.tokens_per_second: float | None = None
        self.tokens_per_answer: float | None = None
        self._last: float | None = None
        self._seconds = 0.0
        self._tokens = 0

    def step(self, outputs: Sequence[EngineOutput], now: float) -> None:
        """Counts the tokens of a step, and the time since the one before."""
        if self._last is not None:
            self._seconds += now - self._last
            self._tokens += sum([len(output.new_token_ids) for output in outputs])
        self._last = now
        if self._seconds >= WINDOW:
            self.tokens_per_second = _moved(self.tokens_per_second, self._tokens / self._seconds)
            self._seconds, self._tokens = 0.0, 0

    def rest(self) -> None:
        """Leaves out the time from now to the next step: there is nothing to do."""
        self._last = None

    def answer(self, num_tokens: int) -> None:
        """Counts an answer that has ended."""
        self.tokens_per_answer = _moved(self.tokens_per_answer, num_tokens)

    def seconds_for(self, num_answers: float) -> float | None:
        """Returns how long so many answers take; None where too little has been measured."""
        if not self.tokens_per_second or self.tokens_per_answer is None:
            return None
        return num_answers * self.tokens_per_answer / self.tokens_per_second


def _moved(average: float | None, value: float) -> float:
    return value if average is None else average + WEIGHT * (value - average)
