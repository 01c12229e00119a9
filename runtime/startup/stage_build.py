"""A stage of a pipeline put together: its part of the plan, and what joins it with its neighbours."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...common.errors import CompileError
from ...compiler.execution.message import MessageLayout
from ...compiler.execution.plan import BoundPlan, Compiled, Plan
from ...compiler.execution.stages import stage_of
from ...compiler.uncompiled import uncompiled_plan
from ...custom_ops.all_reduce.group import current_world
from ..worker.stage_link import StageLink
from .resolved import ResolvedRuntime


class StageBuild:
    """Binds a stage's plans, with adapters and without, which find what they take in the same memory."""

    def __init__(self, resolved: ResolvedRuntime) -> None:
        self._resolved = resolved
        self._layouts: tuple[MessageLayout, MessageLayout] | None = None
        self._received: Tensor | None = None

    def forward(
        self, resolved: ResolvedRuntime, compiled: Compiled | None, tensors: Mapping[str, Tensor]
    ) -> BoundPlan:
        """The stage's part of a plan on its weights; where nothing is compiled, of one that is traced."""
        whole = uncompiled_plan(resolved.program()) if compiled is None else compiled.plan
        assert resolved.stage is not None, "a stage of a model that has none"
        plan = stage_of(whole, resolved.stage.layers)
        self._agree(plan)
        return plan.bind(tensors, resolved.device, self._received)

    def link(self) -> StageLink:
        """What joins the stage with its neighbours, once a plan is bound; all ranks make theirs."""
        resolved, world = self._resolved, current_world()
        assert self._layouts is not None, "a stage without a plan"
        takes, gives = self._layouts
        return StageLink(
            world.mail(resolved.device),
            takes=takes if takes.values else None,
            gives=gives if gives.values else None,
            received=self._received,
            source=world.rank - resolved.model.ranks,
            target=world.rank + resolved.model.ranks,
            max_num_tokens=resolved.max_num_batched_tokens,
            device=resolved.device,
        )

    def _agree(self, plan: Plan) -> None:
        """Room for what the first plan takes; CompileError where another takes or gives something else."""
        layouts = plan.layout(plan.takes), plan.layout(plan.gives)
        if self._layouts is None:
            self._layouts = layouts
            if plan.takes:
                size = layouts[0].num_bytes(self._resolved.max_num_batched_tokens)
                self._received = torch.zeros(size, dtype=torch.uint8, device=self._resolved.device)
        if layouts != self._layouts:
            raise CompileError("stages hand on something else in steps with adapters; wanted lora=None")


def stage_build(resolved: ResolvedRuntime) -> StageBuild | None:
    """What binds the stage of this process; None where it has the whole model."""
    return None if resolved.stage is None else StageBuild(resolved)
