"""How many replicas of a server Ray Serve has."""

from dataclasses import dataclass
from typing import Any

from ..common.errors import ConfigError, UnknownSettingError
from ..common.names import refuse_unknown
from ..runtime.validation import integer, number

MOST = 4096  # replicas


@refuse_unknown(UnknownSettingError, {})
@dataclass(frozen=True, kw_only=True, slots=True)
class RayServeConfig:
    """How many replicas Ray Serve has, and what each takes of the cluster. ConfigError names the field."""

    min_replicas: int = 1
    """Replicas at least."""
    max_replicas: int | None = None
    """Replicas at most, added and ended by the requests under way; otherwise as many as at least."""
    ongoing_requests: float = 32.0
    """Requests under way in a replica, waiting ones too, that another replica is to be added beyond."""
    num_cpus: float = 1.0
    """CPUs of the cluster that a replica takes."""
    num_gpus: float | None = None
    """GPUs of the cluster that a replica takes, of one node; otherwise one a rank where there are any."""

    def __post_init__(self) -> None:
        low = 1
        for name in ("min_replicas", "max_replicas"):
            value, wanted, optional = getattr(self, name), f"from {low} to {MOST}", name == "max_replicas"
            integer(name, value, wanted, low=low, high=MOST, optional=optional, error=ConfigError)
            low = self.min_replicas
        for name, zero in (("ongoing_requests", False), ("num_cpus", True), ("num_gpus", True)):
            wanted, value = f"{'at least' if zero else 'above'} 0, at most 65536", getattr(self, name)
            optional = name == "num_gpus"
            number(name, value, wanted, high=65536.0, zero=zero, optional=optional, error=ConfigError)

    @property
    def options(self) -> dict[str, Any]:
        """As Ray Serve's deployments take it."""
        if self.max_replicas in (None, self.min_replicas):
            return {"num_replicas": self.min_replicas}
        return {
            "autoscaling_config": {
                "min_replicas": self.min_replicas,
                "max_replicas": self.max_replicas,
                "target_ongoing_requests": self.ongoing_requests,
            }
        }
