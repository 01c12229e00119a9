"""What fits into the memory, and what it would take for more, in words; before anything large is read."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from . import memory
from .resolved import ResolvedRuntime


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSize:
    """What each rank of a stage takes."""

    first_layer: int
    last_layer: int
    weight_bytes: int
    token_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizing:
    """Bytes of a model on a machine; the longest request is one that has the whole cache to itself."""

    device: torch.device
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    weight_bytes: int
    narrow_weight_bytes: int  # in two bytes each, where the scheme does not say otherwise
    available_bytes: int  # free now, before the weights are read
    adjusting_bytes: int  # kept for penalties on a GPU
    token_bytes: int  # keys and values of one token
    block_size: int
    num_blocks: int  # the null block included
    max_model_len: int
    memory_fraction: float
    swap_bytes: int  # of the host, for blocks of requests that were preempted
    quantization: tuple[str, ...]  # how projections are kept, in sentences
    window: int | None  # of its tokens, as many of the last ones a request keeps; None: all
    ranks: int = 1  # of which each takes as many bytes at most
    stages: tuple[StageSize, ...] = ()  # where layers are shared out; the figures above are of one of them

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the cache holds."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def missing_bytes(self) -> int:
        """What a request of max_model_len tokens takes beyond the cache; 0 where it fits."""
        blocks = -(-(self.max_model_len - 1) // self.block_size)  # the last token is only ever read
        return max(0, blocks * self.block_size - self.capacity_tokens) * self.token_bytes

    def sentence(self) -> str:
        """Whether a request of max_model_len tokens fits, and if not, everything that would help."""
        swap = f", {self.swap_bytes / 2**30:.1f} GiB of the host to swap to" if self.swap_bytes else ""
        each = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        cache = f"{self._cache_gib():.1f} GiB of KV cache{each}{swap}"
        held = f"this fits {self.capacity_tokens:,} tokens ({cache})"
        if self.window is not None and self.window < self.max_model_len:
            held += f", and a request keeps its last {self.window:,}"
        if not self.missing_bytes:
            return f"{held}, of which a request may have {self.max_model_len:,}"
        missing = f"for {self.max_model_len:,} you need {self.missing_bytes / 2**30:.1f} GiB more"
        return ", or ".join([f"{held}; {missing}", *self._remedies()])

    def _cache_gib(self) -> float:
        return self.num_blocks * self.block_size * self.token_bytes / 2**30

    def _remedies(self) -> Iterator[str]:
        """Settings with which it would fit, each by itself."""
        yield f"max_model_len={self.capacity_tokens + 1}"
        wanted = self.missing_bytes + self.num_blocks * self.block_size * self.token_bytes
        is_cpu = self.device.type == "cpu"
        kept = 0 if is_cpu else memory.GRAPH_BYTES + self.adjusting_bytes
        fraction = (self.weight_bytes + wanted + kept) / self.available_bytes
        if fraction <= 1:
            if is_cpu:  # where the cache is kept small unasked
                yield f"num_kv_blocks={wanted // (self.token_bytes * self.block_size)}"
            elif fraction > self.memory_fraction:
                yield f"memory_fraction={min(1.0, fraction + 0.005):.2f}"
        left = int(self.available_bytes * self.memory_fraction) - self.narrow_weight_bytes - kept
        budget = min(left, memory.CPU_CACHE_BYTES // self.ranks) if is_cpu else left
        if self.dtype.itemsize == 4 and wanted // 2 <= budget:
            yield "dtype='bfloat16'"
        left = int(self.available_bytes * self.memory_fraction) - self.weight_bytes - kept
        budget = min(left, memory.CPU_CACHE_BYTES // self.ranks) if is_cpu else left
        if self.kv_cache_dtype == self.dtype and wanted // self.dtype.itemsize <= budget:
            yield "kv_cache_dtype='fp8'"


def size(resolved: ResolvedRuntime) -> Sizing:
    """What is known of a model's memory before its weights are read; on a GPU a little less is left."""
    dtype = resolved.dtype
    return Sizing(
        device=resolved.device,
        dtype=dtype,
        kv_cache_dtype=resolved.kv_cache_dtype,
        weight_bytes=memory.weight_bytes(resolved),
        narrow_weight_bytes=memory.weight_bytes(resolved, torch.bfloat16),
        available_bytes=memory.rank_bytes(resolved),
        adjusting_bytes=memory.adjusting_bytes(resolved),
        token_bytes=memory.cache_block_bytes(resolved, 1),
        block_size=resolved.block_size,
        num_blocks=resolved.num_kv_blocks,
        max_model_len=resolved.max_model_len,
        memory_fraction=resolved.config.memory_fraction,
        swap_bytes=resolved.swap_bytes,
        quantization=resolved.schemes.sentences(),
        window=memory.groups_of(resolved)[0].window,
        ranks=resolved.world_size,
        stages=tuple(_stage_size(replace(resolved, stage_index=one.index)) for one in resolved.stages),
    )


def _stage_size(resolved: ResolvedRuntime) -> StageSize:
    assert resolved.stage is not None
    layers = resolved.stage.layers
    return StageSize(
        first_layer=layers[0],
        last_layer=layers[-1],
        weight_bytes=memory.weight_bytes(resolved),
        token_bytes=memory.cache_block_bytes(resolved, 1),
    )
