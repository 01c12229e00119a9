"""Who drafts the tokens that a step verifies beside the next one, and how many: checked when given."""

from dataclasses import dataclass
from pathlib import Path

from ...common.errors import ConfigError, UnknownSettingError, shown
from ...common.names import refuse_unknown
from ..validation import check_name, integer

MAX_DRAFTS = 7  # of a request in a step: with the token before them eight rows, as kernels for few rows take
MAX_NGRAM = 32
MOST_DIGITS = 9
VLLM_NAMES = {
    "num_speculative_tokens": "that is k here",
    "prompt_lookup_max": "that is max_ngram here",
    "prompt_lookup_min": "that is min_ngram here",
}


@refuse_unknown(UnknownSettingError, VLLM_NAMES)
@dataclass(frozen=True, kw_only=True, slots=True)
class NGram:
    """Drafts are the tokens that followed where the request's last tokens came before, in prompt or answer.

    Raises ConfigError, naming the field, for a value that it cannot have.
    """

    k: int = 3
    """Draft tokens of a request in a step, at most."""
    max_ngram: int = 8
    """Last tokens that are looked for, at most: the longest run of them that came before is followed."""
    min_ngram: int = 2
    """Last tokens that have to have come before; where fewer did, nothing is drafted."""

    def __post_init__(self) -> None:
        _settle_count(self, "k", MAX_DRAFTS)
        _settle_count(self, "max_ngram", MAX_NGRAM)
        _settle_count(self, "min_ngram", MAX_NGRAM)
        if self.min_ngram > self.max_ngram:
            got = f"min_ngram is {self.min_ngram} and max_ngram {self.max_ngram}"
            raise ConfigError(f"{got}; wanted min_ngram at most max_ngram")


@refuse_unknown(UnknownSettingError, VLLM_NAMES)
@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """Drafts are a smaller model's, of the same vocabulary."""

    model: str | Path
    """A folder of safetensors, a .gguf file, or the id of a model on a hub."""
    k: int = 3
    """Draft tokens of a request in a step, at most."""

    def __post_init__(self) -> None:
        _check_model(self.model)
        _settle_count(self, "k", MAX_DRAFTS)


@refuse_unknown(UnknownSettingError, VLLM_NAMES)
@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle:
    """Drafts are those of an EAGLE head, which reads the model's own hidden states."""

    model: str | Path
    """A folder of safetensors, or the id of a head on a hub."""
    k: int = 3
    """Draft tokens of a request in a step, at most."""

    def __post_init__(self) -> None:
        _check_model(self.model)
        _settle_count(self, "k", MAX_DRAFTS)


Speculation = NGram | Draft | Eagle


def parse_speculation(text: str) -> Speculation:
    """A drafter as a command line names it: ngram:3, draft:MODEL:3, eagle:MODEL:3, or without the number.

    Raises ConfigError for anything else.
    """
    kind, _, rest = text.partition(":")
    model, _, last = rest.rpartition(":") if kind != "ngram" else ("", "", rest)
    if kind != "ngram" and not last.isdecimal():
        model, last = rest, ""
    k = {"k": int(last)} if last.isdecimal() and len(last) <= MOST_DIGITS else {}
    if kind == "ngram" and (k or not rest):
        return NGram(**k)
    if kind in ("draft", "eagle") and model and (k or not last):
        return Draft(model=model, **k) if kind == "draft" else Eagle(model=model, **k)
    raise ConfigError(
        f"speculative is {shown(text)}; wanted ngram, ngram:3, draft:MODEL:3 or eagle:MODEL:3, of up to "
        f"{MAX_DRAFTS} draft tokens"
    )


def draft_lengths(k: int) -> tuple[int, ...]:
    """The numbers of drafts that a step may have, the largest first: each about half of the one before."""
    lengths = []
    while k:
        lengths.append(k)
        k //= 2
    return tuple(lengths)


def spare_columns(k: int, block_size: int) -> int:
    """Columns of a block table after a request's last that its drafts may reach; 0 where nobody drafts."""
    return -(-(k + 1) // block_size) + 1 if k else 0


def _settle_count(config: object, name: str, most: int) -> None:
    wanted = f"1 to {most}"
    value = integer(name, getattr(config, name), wanted, low=1, high=most, optional=False, error=ConfigError)
    object.__setattr__(config, name, value)


def _check_model(model: object) -> None:
    if not isinstance(model, (str, Path)):
        raise ConfigError(f"model is {shown(model)}; wanted a folder, a .gguf file or a hub id")
    check_name("model", model)
