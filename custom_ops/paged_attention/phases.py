"""Which provider of paged attention serves decode and which serves prefill, by what was measured."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from ...common.errors import UnsupportedError
from ...common.logging import get_logger, log_once
from .._shared import registry
from .._shared.registry import Call, Selected
from . import _arguments, _cuda, _flash_attn

logger = get_logger("custom_ops")

FLASH = _flash_attn.PROVIDER
OF_OTHER_BITS = ("triton", FLASH.name)  # in other batches: they split keys by the number of sequences
ONLY_CUDA = "only cuda has one"
# docs/attention_backends.md has the figures behind both rules.
LONGEST_DECODE = 16  # queries a sequence; a step with more in any of them is prefill
MAX_QUERY_LEN = 7  # where the op's arguments hold how many there are
CHUNK = 10  # and where the chunks of which FlashAttention knows nothing

FindFlash = Callable[[torch.device, int, int], _flash_attn.Choice]
FindObstacle = Callable[[torch.device, torch.dtype, int, int], str | None]


def select_by_phase(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    is_fp8: bool = False,  # the cache
    op: str = "paged_attention",
    find_flash: FindFlash = _flash_attn.choose,
    hopper_obstacle: FindObstacle = _cuda.hopper_obstacle,
) -> Selected:
    """The named provider for every step; with "auto", one for decode and perhaps another for prefill."""
    selected = registry.select(op, device=device, dtype=dtype, provider=name)
    if is_fp8:
        return _over_fp8(selected, name, op, device, dtype, head_dim)
    if selected.name == FLASH.name:
        choice = find_flash(device, head_dim, block_size)
        if choice.version is None:
            raise UnsupportedError(f"{op}: {choice.reason}")
        return selected
    if name != "auto" or device.type != "cuda":
        return selected
    sizes = device, dtype, head_dim, block_size
    obstacle = hopper_obstacle(*sizes) if selected.name == _cuda.PROVIDER.name else ONLY_CUDA
    if obstacle is None:
        faster, why = False, "its kernel for Hopper"
    else:
        faster, why = _flash_in_prefill(*sizes, find_flash)
        why += "" if faster else f"; not its kernel for Hopper: {obstacle}"
    if faster:
        flash = registry.select(op, device=device, dtype=dtype, provider=FLASH.name)
        served_by, call = f"{selected.name}+{flash.name}", _by_length(selected.call, flash.call)
        reason = f"{selected.name} in decode ({selected.reason}), {flash.name} in prefill ({why})"
    else:
        served_by, call = selected.name, selected.call
        reason = f"{selected.name} in decode ({selected.reason}) and in prefill ({why})"
    log_once(logger, logging.INFO, f"attention on {device.type} {dtype}: {reason}")
    return Selected(name=served_by, call=call, reason=reason)


def select_batch_invariant(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    is_fp8: bool = False,  # the cache
    op: str = "paged_attention",
) -> Selected:
    """The provider whose rows have the same bits in any batch; UnsupportedError for a name of others."""
    if name in OF_OTHER_BITS:
        raise UnsupportedError(f"attention is {name!r} and batch_invariant True; wanted 'auto' or 'cuda'")
    wanted = _cuda.PROVIDER.name if name == "auto" and device.type == "cuda" else name
    selected = registry.select(op, device=device, dtype=dtype, provider=wanted)
    obstacle = (
        _arguments.fp8_obstacle(dtype, head_dim) if is_fp8 and selected.name == _cuda.PROVIDER.name else None
    )
    if obstacle is not None:
        raise UnsupportedError(f"{op}: {obstacle}; use kv_cache_dtype='auto'")
    return selected


def _over_fp8(
    selected: Selected, name: str, op: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> Selected:
    """The provider for a cache in FP8: FlashAttention takes none, CUDA kernels not beside any queries."""
    obstacle = _flash_attn.FP8_OBSTACLE if selected.name == FLASH.name else None
    if selected.name == _cuda.PROVIDER.name:
        obstacle = _arguments.fp8_obstacle(dtype, head_dim)
    if obstacle is None:
        return selected
    if name != "auto":
        raise UnsupportedError(f"{op}: {obstacle}; use attention='auto', or kv_cache_dtype='auto'")
    log_once(logger, logging.INFO, f"attention on {device.type} {dtype}: triton ({obstacle})")
    return registry.select(op, device=device, dtype=dtype, provider="triton")


def _flash_in_prefill(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int, find_flash: FindFlash
) -> tuple[bool, str]:
    """Whether FlashAttention serves prefill, and why."""
    obstacle = FLASH.obstacle(device, dtype)
    if obstacle is not None:
        return False, obstacle
    version, _, reason = find_flash(device, head_dim, block_size)
    if version is None:
        return False, reason
    if not version.beats_ours:
        return False, f"{version.name} was not measured to be faster"
    return True, f"{version.name} is faster there"


def _by_length(decode: Call, prefill: Call) -> Call:
    def paged_attention(*args: Any) -> Any:
        ours = args[MAX_QUERY_LEN] <= LONGEST_DECODE or args[CHUNK] >= 0
        return (decode if ours else prefill)(*args)

    return paged_attention
