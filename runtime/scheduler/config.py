"""The limits that the scheduler keeps."""

from dataclasses import dataclass

from ...common.errors import ConfigError

BOUNDS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_tokens_beside_decode",
    "prefill_chunk",
    "max_prefill_tokens",
    "max_num_samples",
    "num_batches",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of a step: requests, tokens in all, tokens in all where someone awaits the next token of an
    answer (max_tokens_beside_decode), tokens of one request (prefill_chunk), tokens beyond one of each
    running request (max_prefill_tokens); None for no limit of its own.

    max_drafts: draft tokens of a request, 0 where nobody drafts. token_cost: how much longer a token more
    makes a step, as a part of what a step takes that has next to none. max_num_samples: of a step with
    drafts; None for one a request. num_lookahead_tokens: beyond those of a step, that each request is to have
    blocks for where there are any: a model that drafts keeps keys and values of its drafts there.
    max_loras: adapters of a step at most. num_batches: steps in flight that share no request, as stages of a
    pipeline compute them at the same time; 1: the device knows the tokens of the step before, and a request
    is in every step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_tokens_beside_decode: int | None = None
    prefill_chunk: int | None = None
    max_prefill_tokens: int | None = None
    max_drafts: int = 0
    token_cost: float = 0.0
    max_num_samples: int | None = None
    num_lookahead_tokens: int = 0
    max_loras: int = 0
    num_batches: int = 1

    @property
    def most_samples(self) -> int:
        """Samples of a step at most."""
        return self.max_num_seqs if self.max_num_samples is None else self.max_num_samples

    def __post_init__(self) -> None:
        for name in BOUNDS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; wanted at least 1")
        if self.max_model_len < 2:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}; wanted at least 2: a prompt and a new token"
            )
