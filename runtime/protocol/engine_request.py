"""One request for the engine's core: token ids and parameters, no text."""

from dataclasses import dataclass

from ..pooling_params import PoolingParams
from ..sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRequest:
    """What the core is asked for. It pickles, unless `params` holds logits processors that do not.

    The output is at most `max_total_tokens` long together with the prompt. `cache_salt` parts the prefix
    cache: blocks are shared among requests of the same one. `is_counted` is False for a part of a request
    that is counted as one by its maker.
    """

    request_id: str  # unique among the requests that are live
    prompt_token_ids: tuple[int, ...]  # at least one
    params: SamplingParams  # resolved
    stop_token_ids: frozenset[int] = frozenset()  # ids that end it: every EOS and the caller's own
    max_total_tokens: int
    priority: int = 0  # lower is served first
    timeout: float | None = None  # seconds from when it is queued
    cache_salt: str = ""
    adapter: str | None = None  # the digest of the bytes of what it is computed with beside the model
    grammar: str | None = None  # of llguidance, that the output keeps to
    pooling: PoolingParams | None = None  # what is made of its hidden states in place of tokens, if anything
    is_counted: bool = True
    wants_each_token: bool = False  # an output after each step that brought it a token, or one at its end

    @property
    def block_salt(self) -> str:
        """What parts its blocks from others': the salt, and the adapter by its bytes, not by its name."""
        if self.adapter is not None:
            return f"\0{self.adapter}\0{self.cache_salt}"
        return f"\0\0{self.cache_salt}" if self.cache_salt.startswith("\0") else self.cache_salt
