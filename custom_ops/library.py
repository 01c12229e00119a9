"""Registration of the ops with torch, through Library.define/impl so that no call imports Dynamo."""

from collections.abc import Callable
from typing import Any

import torch

from . import registry
from .registry import Provider

_Library: Any = torch.library.Library  # torch leaves it without types
LIBRARY = _Library("lamina", "FRAGMENT")

DEVICES = {"CPU": "cpu", "CUDA": "cuda"}  # dispatch key: device type


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
    calls: dict[torch.dtype, Callable[..., Any]] = {}

    def implementation(*args: Any) -> Any:
        dtype = args[0].dtype
        call = calls.get(dtype)
        if call is None:
            selected = registry.select(op, device=torch.device(device_type), dtype=dtype)
            call = calls[dtype] = selected.call
        return call(*args)

    return implementation
