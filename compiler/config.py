"""What a user may ask of the compiler."""

from dataclasses import dataclass
from types import NoneType
from typing import Literal

from ..common.errors import ConfigError, UnknownSettingError, shown
from ..common.names import refuse_unknown
from .passes.graph import Pass
from .passes.pipeline import check_passes


@refuse_unknown(UnknownSettingError, {})
@dataclass(frozen=True, kw_only=True, slots=True)
class CompileConfig:
    """Which passes run, and whether steps are captured as CUDA graphs.

    cuda_graphs="auto" captures on a GPU a few sizes that serve all steps, padded, and others once the runtime
    is ready: an engine that has nothing to do, and any size between two steps that came often without. "on"
    captures all sizes before, and everywhere: a CPU runs the captured code again on the same padded, static
    tensors, a way to look for faults of padding and not to be fast. "lazy" is "on", but the runtime is ready
    before anything is captured: Runtime.idle() captures one size a call.
    """

    passes: tuple[str | Pass, ...] | None = None
    """Names out of compiler.passes.pipeline, which run in its order, and passes of your own, which run before
    `lower`; None is all that Lamina has."""
    cuda_graphs: Literal["auto", "on", "off", "lazy"] = "auto"
    """CUDA graph capture: by auto, of whole steps on a GPU, few sizes at the start and others as they are
    wanted, and of CPU call graphs on a CPU; by on, of whole steps of all sizes at the start, everywhere; by
    lazy, likewise, but one at a time by Runtime.idle(); by off, of nothing."""
    verify: bool = True
    """Whether each piece is compared, when it is compiled, with its graph run op by op, both against float64;
    an error that rounding does not explain is a CompileError that names the pass to leave out."""
    batch_invariant: bool = False
    """Whether the bits of a request's logits are the same whatever runs beside it, however its prompt is cut
    and wherever its prefix comes from; docs/batch_invariance.md says at what cost, and what is refused."""
    strict: bool = False
    """Whether what would be built once the runtime is ready is an error; otherwise it is counted and
    explained."""

    def __post_init__(self) -> None:
        if not isinstance(self.cuda_graphs, str) or self.cuda_graphs not in ("auto", "on", "off", "lazy"):
            raise ConfigError(f"cuda_graphs is {shown(self.cuda_graphs)}; wanted auto, on, off or lazy")
        for name in ("verify", "batch_invariant", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {shown(getattr(self, name))}; wanted True or False")
        if not isinstance(self.passes, (tuple, list, NoneType)):
            raise ConfigError(f"passes is {shown(self.passes)}; wanted None or a tuple of names and passes")
        check_passes(self.passes or ())
