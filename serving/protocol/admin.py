"""The body of /update_weights, and what those who run a server are answered."""

from typing import Literal

import msgspec

from .decoding import Body
from .response_models import ResponseModel


class Group(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A WeightGroup that the server joins."""

    port: int
    rank: int
    world_size: int
    host: str = "127.0.0.1"
    backend: Literal["gloo", "nccl"] = "gloo"
    timeout: float = 600.0


class UpdateWeightsRequest(Body, kw_only=True, frozen=True):
    """Where the weights are that the server is to use from now on: a folder, or a group that sends them."""

    folder: str | None = None
    """A folder of the server's machine, or a hub id: a checkpoint of the same model."""
    group: Group | None = None
    """A group whose rank 0 sends them."""


class Sleeping(ResponseModel, kw_only=True):
    """Whether the engine sleeps."""

    is_sleeping: bool


class Engine(ResponseModel, kw_only=True):
    """One of several engines, or the only one."""

    engine: int
    """Its number, from 0."""
    state: Literal["serving", "draining", "drained", "lost"]
    reason: str | None
    """Why it cannot step, where it cannot."""
    num_requests: int | None
    """Requests that it has, where there are several engines."""


class Engines(ResponseModel, kw_only=True):
    """Every engine of a model."""

    engines: list[Engine]


class Updated(ResponseModel, kw_only=True):
    """What answers depend on from now on."""

    system_fingerprint: str
