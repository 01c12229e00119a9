"""Registration of the ops with torch, through Library.define/impl so that no call imports Dynamo."""

from collections.abc import Callable
from typing import Any

import torch

from . import registry
from .registry import Provider

_Library: Any = torch.library.Library  # torch leaves it without types
LIBRARY = _Library("lamina", "FRAGMENT")

OF_RANKS = frozenset({"all_reduce"})
DEVICES = {"CPU": "cpu", "CUDA": "cuda"}  # dispatch key: device type


def no_result(*args: Any, **options: Any) -> None:
    """The fake of an op that writes into its arguments and returns nothing."""


def define_op(
    schema: str, *, fake: Callable[..., Any], check: Callable[..., None], providers: tuple[Provider, ...]
) -> None:
    """Register lamina::<schema>; a real call is checked and goes to the provider that "auto" selects."""
    op = schema.partition("(")[0]
    registry.register(op, check=check, providers=providers)
    declare_op(schema, fake=fake, implement=lambda device_type: _automatic(op, device_type))


def declare_op(
    schema: str, *, fake: Callable[..., Any], implement: Callable[[str], Callable[..., Any]]
) -> None:
    """Register lamina::<schema> with one implementation a device type."""
    op = schema.partition("(")[0]
    LIBRARY.define(schema)
    torch.library.register_fake(f"lamina::{op}", fake, lib=LIBRARY)
    for key, device_type in DEVICES.items():
        LIBRARY.impl(op, implement(device_type), key)


def _automatic(op: str, device_type: str) -> Callable[..., Any]:
    device = torch.device(device_type)
    return _by_dtype(lambda dtype: registry.select(op, device=device, dtype=dtype).call)


def direct_call(op: str, device: torch.device) -> Callable[..., Any]:
    """What torch.ops.lamina.<op> does on a device, without the dispatcher and the check of its arguments.

    For compiled pieces, whose arguments were checked when they were made. An op that asks other ranks goes
    through the dispatcher all the same: there a capture takes it for one call, not for what it is made of.
    """
    if op in OF_RANKS:
        dispatched: Callable[..., Any] = getattr(torch.ops.lamina, op).default
        return dispatched
    return _by_dtype(lambda dtype: registry.unchecked(op, device=device, dtype=dtype))


def _by_dtype(find: Callable[[torch.dtype], Callable[..., Any]]) -> Callable[..., Any]:
    """A call of what is found for the dtype of the first argument, looked for once."""
    calls = registry.calls_by_dtype()

    def implementation(*args: Any, **options: Any) -> Any:
        dtype = args[0].dtype
        call = calls.get(dtype)
        if call is None:
            call = calls[dtype] = find(dtype)
        return call(*args, **options)

    return implementation
