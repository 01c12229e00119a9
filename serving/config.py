"""How a server is set up, checked when it is made."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Where a server listens, whom it lets ask, and how much of it."""

    model_names: tuple[str, ...]
    """Names under which clients ask for the model; the first is the one in answers."""
    host: str = "127.0.0.1"
    """Address to listen at."""
    port: int = 8000
    """Port to listen at; 0 takes a free one."""
    strict_fields: bool = False
    """Whether unknown fields of a body are refused; otherwise a header names them."""
    uds: Path | None = None
    """A unix socket to listen at in place of host and port."""
    api_key_file: Path | None = None
    """A TOML file of the keys that clients must show, read again on SIGHUP; LAMINA_API_KEY adds to them."""
    no_auth: bool = False
    """Whether everybody may ask without a key at an address that other machines reach."""
    open_routes: tuple[str, ...] = ()
    """Paths besides /health/live that are read without a key, as /metrics."""
    max_waiting: int = 1024
    """Requests that wait for their turn at most; one more is answered 429."""
    max_queue_seconds: float = 600.0
    """Seconds that a request may wait for its turn; it is answered 429 at once where it would be longer."""
    max_sequences: int = 1024
    """Answers of one request, which are its prompts times n or best_of, at most."""
    trust_request_chat_template: bool = False
    """Whether a request may bring a chat template, a program that can run for long."""
    max_prompts: int = 1024
    """Prompts of one request at most."""
    max_logprobs: int = 20
    """So many of the likeliest tokens are told beside a token at most, of answers and of prompts."""
    max_prompt_logprobs: int = 2**18
    """Log-probabilities of the tokens of one request's prompts at most, with those of the likeliest."""
    max_stop: int = 128
    """Strings, or ids, at which the answers of one request end, at most."""
    max_bad_words: int = 128
    """Words that one request excludes at most."""
    max_logit_bias: int = 1024
    """Entries of one request's logit_bias at most."""
    max_messages: int = 8192
    """Messages of one conversation at most."""
