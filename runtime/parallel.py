"""Over how many devices and processes a model is spread, and who runs them."""

from dataclasses import dataclass
from typing import Literal, get_args

from ..common.errors import ConfigError, UnsupportedError, shown
from .validation import integer

ExecutorName = Literal["auto", "uniproc", "multiproc", "ray"]
RayPlacement = Literal["strict_pack", "pack", "spread", "strict_spread"]
MOST_RANKS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How a model is spread over ranks. ConfigError, naming the field, for a value that it cannot have."""

    tensor_parallel: int = 1
    """Ranks that share out every layer, its heads and its columns; 1 keeps a layer whole."""
    pipeline_parallel: int = 1
    """Stages that share out the layers, each of which is as many ranks as tensor_parallel says."""
    data_parallel: int = 1
    """Replicas of all this, each with requests of its own."""
    executor: ExecutorName = "auto"
    """Who runs the ranks; auto is this process where there is one rank, and a process each for more."""
    ray_placement: RayPlacement = "strict_pack"
    """How ranks lie on the nodes of a Ray cluster: on one, on few, on many, on one each."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel", "data_parallel"):
            wanted = f"from 1 to {MOST_RANKS}"
            ranks = integer(
                name, getattr(self, name), wanted, low=1, high=MOST_RANKS, optional=False, error=ConfigError
            )
            object.__setattr__(self, name, ranks)  # only while being built
        names = get_args(ExecutorName)
        if not isinstance(self.executor, str) or self.executor not in names:
            raise ConfigError(f"executor is {shown(self.executor)}; wanted {' or '.join(names)}")
        placements = get_args(RayPlacement)
        if not isinstance(self.ray_placement, str) or self.ray_placement not in placements:
            got = f"ray_placement is {shown(self.ray_placement)}"
            raise ConfigError(f"{got}; wanted {' or '.join(placements)}")
        if self.ray_placement != "strict_pack" and self.executor != "ray":
            got = f"ray_placement is {self.ray_placement!r} and executor {self.executor!r}"
            raise ConfigError(f"{got}; wanted executor='ray' with it")
        if self.executor == "uniproc" and self.world_size > 1:
            got = f"executor is 'uniproc' and {self.world_size} ranks are asked for"
            raise ConfigError(f"{got}; wanted auto, multiproc or ray")

    @property
    def world_size(self) -> int:
        """Ranks of one replica."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def answering_rank(self) -> int:
        """The rank that says what steps come to: the first of the last stage, where tokens are sampled."""
        return self.world_size - self.tensor_parallel

    @property
    def has_processes(self) -> bool:
        """Whether workers have processes of their own."""
        return self.executor in ("multiproc", "ray") or (self.executor == "auto" and self.world_size > 1)

    def require_one_engine(self) -> None:
        """ConfigError where replicas are asked for by who holds one engine."""
        if self.data_parallel > 1:
            raise ConfigError(
                f"data_parallel is {self.data_parallel}; wanted 1 of a Runtime, which has one engine: use "
                "AsyncRuntime.from_pretrained(model, engine='process', data_parallel=...), or lamina serve"
            )

    def require_one_rank(self, reason: str) -> None:
        """ConfigError, with the reason, where a model is spread over several ranks."""
        for name in ("tensor_parallel", "pipeline_parallel"):
            if (ranks := getattr(self, name)) > 1:
                raise ConfigError(f"{name} is {ranks}; wanted 1, since {reason}")

    def check_group(self, size: int) -> None:
        """UnsupportedError where a process that is one of `size` ranks is asked to be one of others.

        One that is no rank of any may start processes that are.
        """
        if self.tensor_parallel != size and not (size == 1 and self.has_processes):
            got = f"tensor_parallel is {self.tensor_parallel}"
            raise UnsupportedError(f"{got}; wanted {size}, as this process is one of so many ranks")
