"""How much memory there is, and how many blocks of KV cache fit into it."""

import functools
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...common.errors import ConfigError
from ...compiler.torch_internals.torch_compat import cpu_has_bfloat16_units
from ...custom_ops.write_kv_cache.int8_rows import cache_width
from ...models.config import ModelConfig
from ...models.registry import find_model
from ...models.rope import rotation_shapes
from ..worker.slabs import slots_within
from . import control_groups

if TYPE_CHECKING:
    from .resolved import ResolvedRuntime

# A laptop is shared with everything else its owner runs, so the cache never takes more than this unasked.
CPU_CACHE_BYTES = 4 << 30
# Pinned memory is lost to everybody else on the machine, so it is never more than this part of what is free.
SWAP_FRACTION = 1 / 8
# What CUDA graphs of all sizes have been seen to take, with room to spare; the ledger says what they took.
GRAPH_BYTES = 1 << 30


MAX_GROUPS = 8  # of layers with block tables of their own


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Layers that share block tables, and how far back any of them sees; None: to the beginning."""

    window: int | None
    layers: tuple[int, ...]


def layer_groups(model: ModelConfig, stages: Sequence[range] = ()) -> tuple[LayerGroup, ...]:
    """The layers by how far they see, in groups of about equal size, those that see all first.

    One group where all see everything, or none does: the widest window is then that of the group. stages: of
    a pipeline, each of which is to have about as many layers of a group.
    """
    reaches = [spec.reach for spec in find_model(model.architecture).attention(model)]
    every = range(model.num_layers)
    if None not in reaches or not any(reaches):
        window = max((reach for reach in reaches if reach is not None), default=None)
        return (LayerGroup(window=window, layers=tuple(every)),)
    kinds = {
        kind: [[layer for layer in layers if reaches[layer] == kind] for layers in stages or [every]]
        for kind in dict.fromkeys([None, *reaches])
    }
    most_layers = max(map(len, stages or [every]))
    size = max(min(max(map(len, own)) for own in kinds.values()), -(-most_layers // MAX_GROUPS))
    return tuple(
        LayerGroup(window=kind, layers=tuple(layer for each in own for layer in each[first : first + size]))
        for kind, own in kinds.items()
        for first in range(0, max(map(len, own)), size)
    )


def groups_of(resolved: "ResolvedRuntime") -> tuple[LayerGroup, ...]:
    """The groups of a runtime, whose block tables all stages share."""
    if not resolved.stages:
        return layer_groups(resolved.model)
    return layer_groups(resolved.model, [stage.layers for stage in resolved.stages])


def own_groups(resolved: "ResolvedRuntime") -> tuple[LayerGroup, ...]:
    """The same, each with the layers of this process's stage alone, if there are several."""
    groups, stage = groups_of(resolved), resolved.stage
    if stage is None:
        return groups
    return tuple(
        LayerGroup(window=group.window, layers=tuple(one for one in group.layers if one in stage.layers))
        for group in groups
    )


def layers_of_block(groups: Sequence[LayerGroup]) -> int:
    """Layers whose keys and values a block of the pool holds."""
    return max(len(group.layers) for group in groups)


def pool_blocks(num_kv_blocks: int, groups: Sequence[LayerGroup]) -> int:
    """Blocks of the pool, the null block included, that are so many of all layers."""
    return (num_kv_blocks - 1) * len(groups) + 1


def block_bytes(
    model: ModelConfig, block_size: int, dtype: torch.dtype, groups: Sequence[LayerGroup] | None = None
) -> int:
    """Bytes of keys and values of every layer for one block of tokens, stored in this dtype.

    groups: of the layers that count, None for all.
    """
    groups = layer_groups(model) if groups is None else groups
    num_layers = len(groups) * layers_of_block(groups)
    elements = cache_width(model.head_dim, dtype)
    return 2 * num_layers * block_size * model.num_kv_heads * elements * dtype.itemsize


def cache_block_bytes(resolved: "ResolvedRuntime", block_size: int | None = None) -> int:
    """The same for a runtime; a drafter's layers lie in the blocks of every group, though one has their use.

    block_size: tokens of a block; None: as many as the runtime's.
    """
    model, dtype = resolved.model, resolved.kv_cache_dtype
    size = resolved.block_size if block_size is None else block_size
    total = block_bytes(model, size, dtype, own_groups(resolved))
    if resolved.own_drafter is not None:
        own = resolved.own_drafter.model
        layers = own.num_layers * len(groups_of(resolved))
        elements = cache_width(own.head_dim, dtype)
        total += 2 * layers * size * own.num_kv_heads * elements * dtype.itemsize
    return total


def weight_bytes(resolved: "ResolvedRuntime", dtype: torch.dtype | None = None) -> int:
    """Bytes of the weights, of a drafter's, and of slots for adapters; dtype: another than the runtime's."""
    dtype, layout = dtype or resolved.dtype, resolved.own_slot_layout
    drafted = 0 if resolved.own_drafter is None else resolved.own_drafter.schemes.num_bytes(dtype)
    slots = 0 if layout is None else layout.num_bytes(dtype)
    return resolved.own_schemes.num_bytes(dtype) + drafted + slots


def default_swap_bytes(resolved: "ResolvedRuntime") -> int:
    """Bytes of the host for preempted requests: as many as the cache has, or an eighth of those free."""
    cache = resolved.num_kv_blocks * cache_block_bytes(resolved)
    own = available_bytes(torch.device("cpu")) // resolved.config.data_parallel
    return min(cache, int(own * SWAP_FRACTION))


def swap_slots(resolved: "ResolvedRuntime") -> int:
    """Blocks that swap_bytes of host memory hold, on the stage where they are largest."""
    each = [replace(resolved, stage_index=stage.index) for stage in resolved.stages] or [resolved]
    block = max(map(cache_block_bytes, each))
    return slots_within(resolved.swap_bytes, block, is_pinned=resolved.device.type == "cuda")


def adjusting_bytes(resolved: "ResolvedRuntime") -> int:
    """Bytes on a GPU if every request has penalties and is as long as can be: its tokens, adjusted logits.

    The tokens lie in one tensor, which is half as large beside its successor when it grows last.
    """
    if resolved.device.type == "cpu":
        return 0
    history = 4 * resolved.max_num_seqs * resolved.max_model_len
    return history + history // 2 + 4 * resolved.max_num_seqs * resolved.model.vocab_size


def num_kv_blocks(resolved: "ResolvedRuntime") -> int:
    """Blocks for the longest requests the engine may hold at once, or as many as memory allows.

    ConfigError, with both figures, where not even one block beside the null block fits.
    """
    per_block = cache_block_bytes(resolved)
    per_request = -(-resolved.max_model_len // resolved.block_size)
    wanted = resolved.max_num_seqs * per_request + 1
    available = rank_bytes(resolved)
    weights = weight_bytes(resolved)
    budget = int(available * resolved.config.memory_fraction) - weights - adjusting_bytes(resolved)
    if resolved.device.type == "cpu":
        budget = min(budget, CPU_CACHE_BYTES // resolved.world_size)
    blocks = min(wanted, budget // per_block)
    if blocks < 2:
        raise ConfigError(
            f"{available / 2**30:.1f} GiB are available{limited(resolved)}, the weights take "
            f"{weights / 2**30:.1f} GiB and a block of KV cache "
            f"{per_block / 2**20:.1f} MiB: raise memory_fraction, lower block_size, or use a smaller dtype"
        )
    return blocks


def check_weights_and_rope(resolved: "ResolvedRuntime") -> None:
    """ConfigError, naming the field, where a size that config.json gives is beyond what is available."""
    model, available = resolved.model, rank_bytes(resolved)
    weights = weight_bytes(resolved)
    shapes = rotation_shapes(model, resolved.max_model_len).values()
    angles = sum(4 * rows * columns for rows, columns in shapes)
    if weights > available:
        raise ConfigError(
            f"{available / 2**30:.1f} GiB are available{limited(resolved)} and the weights take "
            f"{weights / 2**30:.1f} GiB "
            f"(vocab_size {model.vocab_size}, hidden_size {model.hidden_size}, intermediate_size "
            f"{model.intermediate_size}, {model.num_layers} layers): use a smaller dtype or a smaller model"
        )
    if angles > available - weights:
        raise ConfigError(
            f"max_position_embeddings is {model.max_position_embeddings} and max_model_len "
            f"{resolved.max_model_len}: the rotation angles of so many take {angles / 2**30:.1f} GiB "
            f"where {(available - weights) / 2**30:.1f} GiB are available beside the weights; lower both"
        )


def check_fit(resolved: "ResolvedRuntime") -> None:
    """ConfigError, with both figures, where the cache that was asked for cannot be had."""
    per_block = cache_block_bytes(resolved)
    available = rank_bytes(resolved)
    if resolved.num_kv_blocks * per_block > available:
        raise ConfigError(
            f"num_kv_blocks is {resolved.num_kv_blocks}, a KV cache of "
            f"{resolved.num_kv_blocks * per_block / 2**30:.1f} GiB where {available / 2**30:.1f} GiB are "
            f"available{limited(resolved)}; wanted at most {available // per_block}"
        )


def blocks_left(resolved: "ResolvedRuntime", activation_bytes: int) -> int:
    """Blocks for what is free on the GPU once the weights lie there and a step has been tried.

    ConfigError, with the figures, where not even one block beside the null block fits.
    """
    free, total = torch.cuda.mem_get_info(resolved.device)
    memory_fraction = resolved.config.memory_fraction
    per_block = cache_block_bytes(resolved)
    adjusting = adjusting_bytes(resolved)
    kept = int(total * (1 - memory_fraction)) + activation_bytes + GRAPH_BYTES + adjusting
    wanted = resolved.max_num_seqs * -(-resolved.max_model_len // resolved.block_size) + 1
    blocks = min(wanted, (free - kept) // per_block)
    if blocks < 2:
        raise ConfigError(
            f"{free / 2**30:.1f} GiB are free beside the weights; a step takes "
            f"{activation_bytes / 2**30:.1f} GiB, memory_fraction {memory_fraction} keeps "
            f"{total * (1 - memory_fraction) / 2**30:.1f} GiB, penalties of max_num_seqs requests may take "
            f"{adjusting / 2**30:.1f} GiB, and a block of KV cache takes {per_block / 2**20:.1f} MiB: "
            f"raise memory_fraction, or lower max_num_batched_tokens or max_num_seqs"
        )
    return blocks


def weights_of_layer(model: ModelConfig) -> int:
    """Elements of the projections of one layer."""
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return model.hidden_size * (heads + 3 * model.intermediate_size)


def available_bytes(device: torch.device) -> int:
    """Bytes that could be allocated now without pushing anything out."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept  # what torch has and nobody uses is ours, too
    limits = (machine_bytes(), control_groups.memory_left(), _address_space_left())
    return min(limit for limit in limits if limit is not None)


def give_back_cached(device: torch.device) -> None:
    """Gives the driver what torch keeps of a GPU's memory and nobody uses.

    What lies beside others' in it could not be given back while a runtime sleeps.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def rank_bytes(resolved: "ResolvedRuntime") -> int:
    """The same for one of several ranks or engines: on CPUs they share it, on GPUs each has its own."""
    available, config = available_bytes(resolved.device), resolved.config
    is_shared = resolved.device.type == "cpu"
    return available // (resolved.world_size * config.data_parallel) if is_shared else available


def machine_bytes() -> int:
    """Bytes that are free on the machine, whatever this process may have of them."""
    for line in (control_groups.read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _address_space_left() -> int | None:
    """What is left of `ulimit -v`, None where there is no such limit."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = control_groups.read(Path("/proc/self/statm"))
    if most == resource.RLIM_INFINITY or pages is None:
        return None
    return max(0, most - int(pages.split()[0]) * resource.getpagesize())


def limited(resolved: "ResolvedRuntime") -> str:
    """Why less is available than the machine has, in words that follow a figure; "" where it is not so."""
    ranks, is_cpu = resolved.world_size, resolved.device.type == "cpu"
    shared = f" to each of {ranks} ranks" if ranks > 1 else ""
    if is_cpu and (engines := resolved.config.data_parallel) > 1:
        shared += f" of each of {engines} engines" if shared else f" to each of {engines} engines"
    limit, left = control_groups.memory_limit(), control_groups.memory_left()
    if not is_cpu or limit is None or left is None or left > machine_bytes():
        return shared
    return f"{shared} by the limit of this control group, {limit / 2**30:.1f} GiB"


@functools.cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions that multiply bfloat16; without them it is emulated, slowly."""
    return cpu_has_bfloat16_units()
