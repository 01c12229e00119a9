"""`attend` in serving: writes a layer's keys and values into the paged cache, then attends over it."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...common.errors import CompileError, UnsupportedError, shown
from ...common.pages import advise_huge_pages
from ...custom_ops._shared import registry
from ...custom_ops._shared.fp8 import FP8
from ...custom_ops.paged_attention import _cuda
from ...custom_ops.paged_attention._rotating import RotatingDecode
from ...custom_ops.paged_attention.phases import select_batch_invariant, select_by_phase
from ...custom_ops.write_kv_cache.int8_rows import cache_width
from ...models.registry import AttentionSpec
from ..protocol.scheduler_output import NULL_BLOCK
from .input_batch import BatchView

NO_LIMIT = -1
NO_SOFT_CAP = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBackend:
    """Providers of the cache ops, with the reason they were taken."""

    name: str
    reason: str
    write_kv_cache: Callable[..., Any]
    rotary_and_write_kv_cache: Callable[..., Any]
    paged_attention: Callable[..., Any]
    rotating_decode: RotatingDecode | None = None  # both at once, where each sequence has one token


def select_backend(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    kv_cache_dtype: torch.dtype | None = None,  # None: dtype
    batch_invariant: bool = False,
) -> AttentionBackend:
    """The named backend, or for "auto" what serves decode and prefill here; UnsupportedError says why not."""
    check_name(name)
    is_fp8 = kv_cache_dtype == FP8
    select = select_batch_invariant if batch_invariant else select_by_phase
    attention = select(
        name, device=device, dtype=dtype, head_dim=head_dim, block_size=block_size, is_fp8=is_fp8
    )

    if is_fp8 and attention.name == _cuda.PROVIDER.name:
        _cuda.find_fp8_kernel()  # built now, not by the first step

    def write(op: str) -> registry.Selected:
        provider = name if name in registry.providers(op) else "auto"
        return registry.select(op, device=device, dtype=dtype, provider=provider)

    rotary = write("rotary_and_write_kv_cache")
    both_ours = attention.name.split("+")[0] == rotary.name == _cuda.PROVIDER.name
    rotating = None
    if both_ours:
        sizes = device, dtype, kv_cache_dtype or dtype, head_dim, block_size
        rotating = _cuda.find_rotating(*sizes, batch_invariant=batch_invariant)
    return AttentionBackend(
        name=attention.name,
        reason=attention.reason,
        write_kv_cache=write("write_kv_cache").call,
        rotary_and_write_kv_cache=rotary.call,
        paged_attention=attention.call,
        rotating_decode=rotating,
    )


def check_name(name: str) -> None:
    """UnsupportedError for a backend that there is not; one that there is need not run here."""
    known = registry.providers("paged_attention")
    if name != "auto" and name not in known:
        raise UnsupportedError(f"attention is {shown(name)}; wanted auto, {', '.join(known)}")


class PagedAttention:
    """attend(layer, q, k, v, out, cos, sin) for the step begun last; without angles q and k are rotated.

    q and out [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], cos and sin [T, head_dim / 2].
    Written are out, and the layer's keys and values at the slot mapping of its KV-cache group.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        caches: Sequence[tuple[Tensor, Tensor] | None],
        specs: Sequence[AttentionSpec],
        groups: Sequence[int] | None = None,
        kv_scales: Sequence[tuple[float, float]] | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self._backend = backend
        # Per layer: keys, values [num_blocks, block_size, num_kv_heads, head_dim]; None of another stage's.
        self._caches = caches
        self._groups = groups or [0] * len(specs)  # per layer: its KV-cache group
        self._scales = kv_scales or [(1.0, 1.0)] * len(specs)  # per layer: of stored keys, of stored values
        self._masks = [
            (spec.scale, spec.window or NO_LIMIT, spec.chunk or NO_LIMIT, spec.soft_cap or NO_SOFT_CAP)
            for spec in specs
        ]  # per layer: scale, window, chunk, soft cap
        self._flags = (True,) if batch_invariant else ()  # what the op takes behind the scales
        self._batch: BatchView | None = None

    def begin(self, batch: BatchView) -> None:
        """Attend over the block tables of this step from now on."""
        self._batch = batch

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> None:
        batch = self._batch
        assert batch is not None, "attend before begin"
        caches = self._caches[layer]
        assert caches is not None, f"layer {layer} is another stage's"
        key_cache, value_cache = caches
        group, scales, masks = self._groups[layer], self._scales[layer], self._masks[layer]
        slots, tables = batch.slot_mappings[group], batch.block_tables[group]
        rotating = self._backend.rotating_decode if batch.max_query_len == 1 else None
        if cos is not None and rotating is not None and rotating.holds(q, k, masks[0], masks[-1]):
            rotating.attend(
                *(out, q, k, v, cos, sin, key_cache, value_cache, slots, tables),
                *(batch.seq_lens, batch.query_start_loc, *masks, *scales),
            )
            return
        if cos is None:
            self._backend.write_kv_cache(k, v, key_cache, value_cache, slots, *scales)
        else:
            q = self._backend.rotary_and_write_kv_cache(
                q, k, v, cos, sin, key_cache, value_cache, slots, *scales
            )
        self._backend.paged_attention(
            out,
            q,
            key_cache,
            value_cache,
            tables,
            batch.seq_lens,
            batch.query_start_loc,
            batch.max_query_len,
            *masks,
            *scales,
            *self._flags,
        )


def each_layer_once(attend: Callable[..., None], num_layers: int) -> Callable[..., None]:
    """The same `attend` for one forward; CompileError for a layer that there is not, or that comes twice."""
    seen: set[int] = set()

    def checked(layer: int, *tensors: Tensor) -> None:
        check_layer(layer, num_layers, seen)
        seen.add(layer)
        attend(layer, *tensors)

    return checked


def check_layer(layer: int, num_layers: int, seen: Container[int] = ()) -> None:
    """CompileError for a layer that a model of so many has not, or that was met before."""
    if not isinstance(layer, int) or not 0 <= layer < num_layers:
        raise CompileError(
            f"the model calls attend with layer {shown(layer, 20)}; wanted 0 to {num_layers - 1}"
        )
    if layer in seen:
        raise CompileError(f"the model calls attend twice with layer {layer}; wanted once")


def allocate_caches(
    *,
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [num_blocks, block_size, num_kv_heads, head_dim] of every layer; in int8 head_dim + 4.

    The null block is zeros, others have any contents. Memory that no request reaches is never touched; on a
    CPU it comes by huge pages, where the system has them.
    """
    shape = (num_blocks, block_size, num_kv_heads, cache_width(head_dim, dtype))
    caches = [
        (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
        for _ in range(num_layers)
    ]
    for keys, values in caches:
        for cache in (keys, values) if device.type == "cpu" else ():
            advise_huge_pages(cache.data_ptr(), cache.nbytes)
        keys[NULL_BLOCK].zero_()
        values[NULL_BLOCK].zero_()
    return caches
