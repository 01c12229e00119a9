"""A drafter put together from the weights and the plan of the model that drafts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ...compiler.execution.plan import Compiled
from ...models.checkpoints.loaded_weights import LoadedWeights
from ...models.heads.definition import HeadDefinition, head_config
from ..worker.attention import AttentionBackend, PagedAttention, allocate_caches
from ..worker.drafter import Drafter
from ..worker.drafters.draft_model import DraftModelDrafter
from ..worker.drafters.draft_sampler import DraftSampler
from ..worker.drafters.eagle import EagleDrafter, Map
from . import memory
from .forwards import combine_of, forward_of, head_forward_of, logits_of
from .resolved import ResolvedRuntime

Caches = Sequence[tuple[Tensor, Tensor]]
NewModelDrafter = Callable[[ResolvedRuntime, Caches], Drafter]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedDrafter:
    """What is loaded of a model that drafts for another."""

    attention: AttentionBackend
    compiled: Compiled | None  # None: it runs eagerly
    weights: LoadedWeights | None  # None in stages of a pipeline that do not draft
    target_ids: Tensor | None  # the model's id of each of a head's; None where they are equal


def drafter_caches(resolved: ResolvedRuntime) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of a drafter's layers, in the blocks that the model's first group has."""
    if resolved.own_drafter is None:
        return []
    own = resolved.own_drafter.model
    return allocate_caches(
        num_layers=own.num_layers,
        num_blocks=memory.pool_blocks(resolved.num_kv_blocks, memory.groups_of(resolved)),
        block_size=resolved.block_size,
        num_kv_heads=own.num_kv_heads,
        head_dim=own.head_dim,
        dtype=resolved.kv_cache_dtype,
        device=resolved.device,
    )


def new_model_drafter(
    resolved: ResolvedRuntime,
    caches: Caches,
    *,
    loaded: LoadedDrafter,
    tensors: Mapping[str, Tensor],  # of the model that it drafts for
    logits: Map,  # of that model
    num_valid_ids: int,
) -> Drafter:
    """The drafter of a runtime, on these caches."""
    drafter = resolved.own_drafter
    assert drafter is not None, "a runtime without a model that drafts"
    assert loaded.weights is not None, "a model that drafts, without weights"
    own = loaded.weights.by_name | drafter.rope_tables()
    own |= {name: tensors[name] for name in drafter.borrowed}
    attention = _attention(resolved, drafter, loaded.attention, caches)
    sampler = DraftSampler(
        num_valid_ids=min(num_valid_ids, drafter.model.vocab_size),
        vocab_size=resolved.model.vocab_size,
        max_num_seqs=resolved.max_num_seqs,
        dtype=resolved.dtype,
        device=resolved.device,
        target_ids=loaded.target_ids,
    )
    if not isinstance(drafter.definition, HeadDefinition):
        return DraftModelDrafter(
            forward=forward_of(drafter, loaded.compiled, own),
            logits=logits_of(drafter, own),
            attention=attention,
            sampler=sampler,
            block_size=resolved.block_size,
        )
    return EagleDrafter(
        forward=head_forward_of(drafter, loaded.compiled, own),
        combine=combine_of(drafter, own),
        logits=logits_of(drafter, own) if head_config(drafter.model).has_lm_head else logits,
        attention=attention,
        sampler=sampler,
        wants_aux=resolved.residuals,
        block_size=resolved.block_size,
    )


def _attention(
    resolved: ResolvedRuntime, drafter: ResolvedRuntime, backend: AttentionBackend, caches: Caches
) -> PagedAttention:
    """Attention over the blocks of the model's first group: its layers see no further than those do."""
    window = memory.groups_of(resolved)[0].window
    specs = [
        spec if window is None else replace(spec, window=min(spec.window or window, window))
        for spec in drafter.definition.attention(drafter.model)
    ]
    invariant = resolved.config.batch_invariant
    return PagedAttention(backend, caches, specs, batch_invariant=invariant)
