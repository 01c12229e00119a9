"""A model on a machine with nothing left to choose: settings, files and sizes, in one frozen object."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ...common.store import Store
from ...compiler.compile import Program, factors_of
from ...compiler.numerics import MAX_NUM_TOKENS
from ...compiler.torch_internals import torch_compat
from ...models import rope
from ...models.adapters.slots import SlotLayout, slot_layout, with_adapters
from ...models.checkpoints.weights import Checkpoint
from ...models.config import ModelConfig
from ...models.generation_config import GenerationDefaults
from ...models.heads.definition import STATES, HeadDefinition, with_residuals
from ...models.layers import EXACT_OPS, FAST_OPS, Ops
from ...models.pooling.spec import PoolingSpec
from ...models.quantization.model_schemes import ModelSchemes, joined_table, with_stored_weights
from ...models.quantization.scheme import TensorTable
from ...models.registry import ModelDefinition
from ...models.stages import Stage
from ..config import RuntimeConfig

MOST_DRAFTING_SAMPLES = 256  # of a step with drafts: beyond, a token more costs time of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRuntime:
    """What a runtime is: on a GPU `num_kv_blocks` is an estimate until the builder has tried a step there."""

    config: RuntimeConfig  # as the caller gave it
    store: Store
    folder: Path  # of the checkpoint
    checkpoint: Checkpoint | None  # None: weights are made up
    model: ModelConfig  # of one of its ranks
    rank: int  # which of these this process is
    stages: tuple[Stage, ...]  # of a pipeline; empty: the layers are not shared out
    stage_index: int  # of this process; of one that is no rank, the stage that has least memory to spare
    definition: ModelDefinition
    defaults: GenerationDefaults
    dtype: torch.dtype  # of weights
    kv_cache_dtype: torch.dtype  # of stored keys and values
    device: torch.device
    schemes: ModelSchemes  # of projections
    max_model_len: int  # tokens of prompt and answer
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int | None
    max_prefill_tokens: int | None  # in a step, of all prompts together
    block_size: int  # tokens
    num_kv_blocks: int  # the null block included
    swap_bytes: int  # of host memory at most, for blocks of requests that were preempted
    drafter: Self | None = None  # the model or head that drafts for this one, if any; of a runtime of its own
    pooling: PoolingSpec | None = None  # how hidden states are pooled; None: the model only generates
    residuals: tuple[int, ...] = ()  # the layers whose residual sums are further columns of hidden states
    adapts: bool = False  # whether projections read the slots of adapters, too
    # Shape and dtype of what a head reads of its target's weights, by name: of its embedding, if it has none.
    borrowed: TensorTable = field(default_factory=dict)

    @property
    def stage(self) -> Stage | None:
        """The part of the model that is sized and loaded; None: all of it."""
        return self.stages[self.stage_index] if self.stages else None

    @property
    def own_drafter(self) -> Self | None:
        """What drafts in this process: of several stages in the last one alone."""
        return self.drafter if self.stage is None or self.stage.is_last else None

    @property
    def world_size(self) -> int:
        """Ranks of all stages."""
        return self.model.ranks * max(1, len(self.stages))

    @property
    def own_schemes(self) -> ModelSchemes:
        """Those of the parameters that this process holds."""
        return self.schemes if self.stage is None else self.schemes.of_stage(self.stage.parameters)

    @property
    def max_drafts(self) -> int:
        """Draft tokens of a request in a step at most; 0 where nobody drafts."""
        asked = self.config.speculative
        assert not isinstance(asked, str), "a setting that was not parsed"
        return 0 if asked is None else asked.k

    @property
    def generates(self) -> bool:
        """Whether tokens may be asked for."""
        return self.pooling is None or self.pooling.also_generates

    @property
    def max_num_samples(self) -> int:
        """Samples of a step at most: with drafts as many as pay, or one a request."""
        most = min(self.max_num_batched_tokens, MOST_DRAFTING_SAMPLES)
        return max(self.max_num_seqs, most) if self.max_drafts else self.max_num_seqs

    @property
    def shares_vocabulary(self) -> bool:
        """Whether each of several ranks has the logits of some ids alone."""
        sharding = self.schemes.sharding
        return self.model.ranks > 1 and sharding is not None and sharding.shares_rows_of("lm_head")

    def adapted(self) -> Self:
        """The same model with a place for adapters in it: of a plan of its own, which steps with any run."""
        return replace(self, adapts=True)

    @property
    def slot_layout(self) -> SlotLayout | None:
        """The slots for adapters, None where there is no room for any."""
        return self._slot_layout(self.schemes)

    @property
    def own_slot_layout(self) -> SlotLayout | None:
        """The same, of the projections that this process holds."""
        return self._slot_layout(self.own_schemes)

    def _slot_layout(self, schemes: ModelSchemes) -> SlotLayout | None:
        asked = self.config.lora
        assert not isinstance(asked, str), "a setting that was not parsed"
        if asked is None:
            return None
        return slot_layout(
            schemes.specs,
            num_slots=asked.max_loras,
            rank=asked.max_lora_rank,
            num_tokens=MAX_NUM_TOKENS,
        )

    def program(self) -> Program:
        """What the compiler is handed."""
        model, ops, join = self.model, self.ops(), self._join(self.schemes)
        forward_of = with_residuals(self.definition.forward, self.residuals)

        def forward(
            weights: Mapping[str, Tensor], token_ids: Tensor, positions: Tensor, attend: Any
        ) -> Tensor:
            return forward_of(model, join(weights), token_ids, positions, attend, ops)

        def from_states(
            weights: Mapping[str, Tensor], token_ids: Tensor, positions: Tensor, attend: Any, states: Tensor
        ) -> Tensor:
            joined = {**join(weights), STATES: states}
            return forward_of(model, joined, token_ids, positions, attend, ops)

        is_head = isinstance(self.definition, HeadDefinition)
        return Program(
            forward=from_states if is_head else forward,
            states=(model.hidden_size, self.dtype) if is_head else None,
            parameters=self.parameter_table(),
            key={  # for who reads a miss; schemes may differ and have the same tensors
                "architecture": model.architecture,
                "num_layers": model.num_layers,
                "residuals": list(self.residuals),
                "quantization": self.schemes.facts(),
                **({"adapters": True} if self.adapts else {}),
            },
            device=self.device,
        )

    def ops(self) -> Ops:
        """The operations that the model is written in, by its numerics and its schemes."""
        ops = with_stored_weights(EXACT_OPS if self.config.numerics == "exact" else FAST_OPS)
        return with_adapters(ops) if self.adapts else ops

    def joined(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors as the model's functions take them: parts of a projection as one."""
        return self._join(self.own_schemes)(tensors)

    def parameter_table(self) -> TensorTable:
        """Shape and dtype of every tensor that the forward may read."""
        table = self.borrowed | self.schemes.parameter_table(self.dtype)
        if self.adapts and self.slot_layout is not None:
            table |= self.slot_layout.table(self.dtype)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        rotation = rope.rotation_shapes(self.model, self.max_model_len)
        return table | {name: (shape, wide) for name, shape in rotation.items()}

    def _join(self, schemes: ModelSchemes) -> Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]:
        join, layout = schemes.join, self._slot_layout(schemes) if self.adapts else None
        names, ranks = tuple(self.borrowed), self.model.ranks
        if names:
            return lambda weights: {
                **join(weights),
                names[0]: joined_table([weights[name] for name in names], ranks),
            }
        if layout is None:
            return join
        return lambda weights: layout.join(join(weights))

    def rope_tables(self) -> dict[str, Tensor]:
        """The tensors that the forward reads beside the weights."""
        length, dtype = self.max_model_len, self.dtype
        return rope.rotation_tables(self.model, max_model_len=length, dtype=dtype, device=self.device)

    def piece_factors(self) -> dict[str, Any]:
        """What a compiled piece depends on beside its graph."""
        return {"toolchain": torch_compat.toolchain(self.device), "numerics": self.config.numerics}

    def plan_factors(self) -> dict[str, Any] | None:
        """What the plan depends on, None where the caller wants the model to run eagerly."""
        config = self.config.compile_config
        if config is None:
            return None
        return factors_of(self.program(), config, self.config.numerics, self.store)
