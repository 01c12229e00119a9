"""How a server is set up, checked when it is made."""

from dataclasses import dataclass


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
