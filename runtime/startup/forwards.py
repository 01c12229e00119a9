"""What a runner calls of a model: its plan on its weights, or the model as it is written, and its scores."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ...compiler.execution.cpu_call_graph import CpuCallGraphs
from ...compiler.execution.plan import BoundPlan, Compiled
from ...custom_ops import linear
from ...custom_ops.all_reduce.group import group_of
from ...models.heads.definition import STATES, HeadDefinition, head_config, with_residuals
from ...models.layers import Ops
from ...models.pooling.head import apply_dense, load_dense
from ...models.quantization.model_schemes import with_stored_weights
from ..worker.attention import AttentionBackend, PagedAttention, each_layer_once
from ..worker.drafters.eagle import HeadForward, Map
from ..worker.graph_runner import Forward
from ..worker.pooler import Pooler
from ..worker.vocabulary_part import VocabularyPart
from .resolved import ResolvedRuntime
from .stage_build import StageBuild


def forward_of(
    resolved: ResolvedRuntime,
    compiled: Compiled | None,
    tensors: Mapping[str, Tensor],
    stage: StageBuild | None = None,
) -> Forward:
    """The compiled plan on its weights, a stage's part of one, or the model as it is written."""
    if stage is not None:
        return stage.forward(resolved, compiled, tensors)
    if compiled is not None:
        return compiled.plan.bind(tensors, resolved.device)

    model, weights, ops = resolved.model, resolved.joined(tensors), resolved.ops()
    forward, num_layers = with_residuals(resolved.definition.forward, resolved.residuals), model.num_layers

    def eager(token_ids: Tensor, positions: Tensor, attend: PagedAttention) -> Tensor:
        return forward(model, weights, token_ids, positions, each_layer_once(attend, num_layers), ops)

    return eager


def cpu_call_graphs_of(
    resolved: ResolvedRuntime, backend: AttentionBackend, forward: Forward
) -> CpuCallGraphs | None:
    """On a CPU, if attention is kernels: other code may read on the host what changes from step to step."""
    config = resolved.config.compile_config
    is_wanted = config is not None and config.cuda_graphs == "auto"
    is_possible = resolved.device.type == "cpu" and backend.name == "cpu"
    return CpuCallGraphs(forward) if is_wanted and is_possible and isinstance(forward, BoundPlan) else None


def head_forward_of(
    resolved: ResolvedRuntime, compiled: Compiled | None, tensors: Mapping[str, Tensor]
) -> HeadForward:
    """The same of a head, which takes states beside tokens."""
    if compiled is not None:
        plan = compiled.plan.bind(tensors, resolved.device)

        def bound(token_ids: Tensor, positions: Tensor, attend: PagedAttention, states: Tensor) -> Tensor:
            return plan(token_ids, positions, attend, states=states)

        return bound
    model, weights, ops = resolved.model, resolved.joined(tensors), resolved.ops()
    forward, num_layers = resolved.definition.forward, resolved.model.num_layers

    def eager(token_ids: Tensor, positions: Tensor, attend: PagedAttention, states: Tensor) -> Tensor:
        given, attend_ = {**weights, STATES: states}, each_layer_once(attend, num_layers)
        return forward(model, given, token_ids, positions, attend_, ops)

    return eager


def logits_of(resolved: ResolvedRuntime, tensors: Mapping[str, Tensor]) -> Map:
    """The model's, but the GEMM of the LM head is never left to torch: kernels for few rows are ours."""
    model, own_logits = resolved.model, _own_logits_of(resolved, tensors)
    is_head = isinstance(resolved.definition, HeadDefinition)
    num_ids = head_config(model).draft_vocab_size if is_head else model.vocab_size

    def of_all_ids(hidden: Tensor) -> Tensor:
        """Each rank has scores of some ids, and tells the others."""
        own = own_logits(hidden)
        if own.shape[1] == num_ids:
            return own
        return group_of(model.ranks).all_gather(own, 1)[:, :num_ids]

    return of_all_ids


def vocabulary_part_of(
    resolved: ResolvedRuntime, tensors: Mapping[str, Tensor], num_valid_ids: int
) -> VocabularyPart | None:
    """What chooses ids greedily where each rank has the scores of some; None where each has all."""
    if not resolved.shares_vocabulary:
        return None
    logits, group = _own_logits_of(resolved, tensors), group_of(resolved.model.ranks)
    num_own_ids = resolved.schemes.specs["lm_head"].shape[0]
    return VocabularyPart(logits, group, num_own_ids=num_own_ids, num_valid_ids=num_valid_ids)


def _own_logits_of(resolved: ResolvedRuntime, tensors: Mapping[str, Tensor]) -> Map:
    """A rank's, of the ids that it has."""
    model, weights, logits = resolved.model, resolved.joined(tensors), resolved.definition.logits
    ops = _own_gemms(resolved)
    return lambda hidden: logits(model, weights, hidden, ops)


def pooler_of(resolved: ResolvedRuntime, tensors: Mapping[str, Tensor]) -> Pooler | None:
    """What pools hidden states, with the head behind it; None of a model that only generates."""
    spec = resolved.pooling
    if spec is None:
        return None
    if spec.yields == "vector":
        dense = load_dense(resolved.folder, spec.dense, resolved.dtype, resolved.device)
        linear = _own_gemms(resolved).linear
        return Pooler(partial(apply_dense, dense, linear=linear) if dense else None)
    logits = logits_of(resolved, tensors)
    return Pooler(logits if spec.yields == "classes" else partial(_token_logit, logits, spec.token_ids))


def _token_logit(logits: Map, token_ids: Sequence[int], hidden: Tensor) -> Tensor:
    """The logit [n, 1] of the last of these tokens, less that of the first if there are two."""
    own = logits(hidden)[:, list(token_ids)].to(torch.float32)
    return own[:, -1:] - own[:, :1] if len(token_ids) > 1 else own


def combine_of(resolved: ResolvedRuntime, tensors: Mapping[str, Tensor]) -> Map:
    """What a head makes of its target's states."""
    definition, model, weights = resolved.definition, resolved.model, resolved.joined(tensors)
    assert isinstance(definition, HeadDefinition)
    combine, ops = definition.combine, _own_gemms(resolved)
    return lambda states: combine(model, weights, states, ops)


def _own_gemms(resolved: ResolvedRuntime) -> Ops:
    gemm = partial(linear, batch_invariant=resolved.config.batch_invariant)
    return with_stored_weights(resolved.ops()._replace(linear=gemm))
