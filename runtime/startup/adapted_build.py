"""What computes steps with adapters, put together: slots on the device, and a plan that reads them."""

from collections.abc import Callable, Mapping

from torch import Tensor

from ...common.errors import UnsupportedError
from ...compiler.execution.plan import Compiled
from ...custom_ops._shared import registry
from ..adapters.config import LoRAConfig
from ..worker.adapters import Adapted, Adapters
from ..worker.attention import AttentionBackend
from .forwards import cpu_call_graphs_of, forward_of
from .resolved import ResolvedRuntime
from .stage_build import StageBuild


def new_adapted_parts(
    resolved: ResolvedRuntime,
    backend: AttentionBackend,
    compiled: Compiled | None,
    tensors: Mapping[str, Tensor],
    stage: StageBuild | None = None,
) -> Callable[[], Adapted] | None:
    """What steps with adapters are computed by, in the same slots for every runner; None without room."""
    layout, config = resolved.own_slot_layout, resolved.config.lora
    if layout is None or not isinstance(config, LoRAConfig):
        return None
    op = registry.select("lora", device=resolved.device, dtype=resolved.dtype)  # built now, if need be
    if resolved.config.batch_invariant and op.name == "reference":
        raise UnsupportedError(
            f"lora is given and batch_invariant True, but on {resolved.device.type} in {resolved.dtype} "
            "their GEMMs sum by the number of rows: use another dtype, or leave the mode"
        )
    adapters = Adapters(
        resolved.own_schemes,
        layout,
        rank=resolved.rank,
        max_held=config.max_held,
        dtype=resolved.dtype,
        device=resolved.device,
    )
    forward = forward_of(resolved.adapted(), compiled, {**tensors, **adapters.tensors}, stage)
    return lambda: Adapted(forward, cpu_call_graphs_of(resolved, backend, forward), adapters)
