"""Which implementations each op has, and which one serves a device and dtype."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...common.errors import KernelBuildError, UnsupportedError
from ...common.logging import get_logger, log_once

logger = get_logger("custom_ops")

Call = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Provider:
    """One implementation of an op: where it runs, and how to get hold of it."""

    name: str
    load: Callable[[], Call]  # may build a kernel, so it runs only when the provider is chosen
    devices: frozenset[str] | None = None  # device types; None: all
    dtypes: frozenset[torch.dtype] | None = None  # None: all

    def runs_on(self, device_type: str) -> bool:
        """Whether it is made for this type of device."""
        return self.devices is None or device_type in self.devices

    def obstacle(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this provider cannot serve the device and dtype, or None if it can."""
        if not self.runs_on(device.type):
            return f"{self.name} does not run on {device.type}"
        if self.dtypes is not None and dtype not in self.dtypes:
            return f"{self.name} does not take {dtype}"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Selected:
    """The chosen provider of an op: its arguments are the op's, and they are checked."""

    name: str
    call: Call
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Op:
    check: Callable[..., None]
    providers: dict[str, Provider]  # the most wanted first


_ops: dict[str, _Op] = {}
_forced: dict[str, str] = {}  # provider by op, while somebody compares them
_found: list[dict[torch.dtype, Call]] = []  # what callers keep, to be found again when that changes


def register(op: str, *, check: Callable[..., None], providers: tuple[Provider, ...]) -> None:
    """Make an op known, with its argument check and its providers, the preferred ones first."""
    assert op not in _ops, f"{op} is registered twice"
    _ops[op] = _Op(check=check, providers={provider.name: provider for provider in providers})


def providers(op: str) -> tuple[str, ...]:
    """Names of an op's providers, the preferred ones first."""
    return tuple(_find(op).providers)


@contextlib.contextmanager
def forced(wanted: Mapping[str, str]) -> Iterator[None]:
    """While it lasts, "auto" is the named provider of each of these ops: to measure and compare them.

    CUDA graphs captured before stay as they are. Raises UnsupportedError for an op or a provider that is not
    known; a call where the provider cannot run raises it.
    """
    for op, provider in wanted.items():
        if provider not in providers(op):
            raise UnsupportedError(f"{op} has no provider {provider!r}; wanted {', '.join(providers(op))}")
    before = dict(_forced)
    _force({**before, **wanted})
    try:
        yield
    finally:
        _force(before)


def _force(wanted: dict[str, str]) -> None:
    _forced.clear()
    _forced.update(wanted)
    for calls in _found:
        calls.clear()


def calls_by_dtype() -> dict[torch.dtype, Call]:
    """An empty cache for what `select` finds, emptied again whenever another provider is forced."""
    _found.append({})
    return _found[-1]


def runs_on(op: str, provider: str, device_type: str) -> bool:
    """Whether a provider of an op is made for this type of device."""
    return _find(op).providers[provider].runs_on(device_type)


def select(op: str, *, device: torch.device, dtype: torch.dtype, provider: str = "auto") -> Selected:
    """The named provider, or an error saying why it cannot run; "auto" the forced, or the first that can."""
    if provider == "auto":
        provider = _forced.get(op, provider)
    if provider == "auto":
        return _select_auto(op, device.type, dtype)
    known = _find(op).providers
    if provider not in known:
        raise UnsupportedError(f"{op} has no provider {provider!r}; wanted auto, {', '.join(known)}")
    obstacle = known[provider].obstacle(device, dtype)
    if obstacle is not None:
        raise UnsupportedError(f"{op}: {obstacle}; use provider 'auto'")
    return Selected(name=provider, call=_load(op, provider), reason="chosen by the caller")


def _find(op: str) -> _Op:
    if op not in _ops:
        raise UnsupportedError(f"no op {op!r}; known: {', '.join(sorted(_ops))}")
    return _ops[op]


@functools.cache
def _select_auto(op: str, device_type: str, dtype: torch.dtype) -> Selected:
    obstacles: list[str] = []
    level = logging.INFO
    candidates = {name: x for name, x in _find(op).providers.items() if x.runs_on(device_type)}
    for name, provider in candidates.items():
        obstacle = provider.obstacle(torch.device(device_type), dtype)
        if obstacle is None:
            try:
                call = _load(op, name)
            except KernelBuildError as error:
                obstacle, level = str(error), logging.WARNING
            except UnsupportedError as error:  # an optional package that is not there
                obstacle = str(error)
        if obstacle is None:
            reason = "; ".join(obstacles) or "first choice"
            log_once(logger, level, f"{op} on {device_type} {dtype}: {name} ({reason})")
            return Selected(name=name, call=call, reason=reason)
        obstacles.append(obstacle)
    why = "; ".join(obstacles) or f"none of {', '.join(providers(op))} runs on {device_type}"
    raise UnsupportedError(f"{op} on {device_type} {dtype}: {why}")


def unchecked(op: str, *, device: torch.device, dtype: torch.dtype) -> Call:
    """What select calls without the check, for arguments that are known to fit."""
    return _implementation(op, select(op, device=device, dtype=dtype).name)


@functools.cache
def _implementation(op: str, name: str) -> Call:
    return _find(op).providers[name].load()


@functools.cache
def _load(op: str, name: str) -> Call:
    check, call = _find(op).check, _implementation(op, name)

    def checked(*args: Any) -> Any:
        check(*args)
        return call(*args)

    return checked
