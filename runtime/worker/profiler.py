"""A worker's profiler: torch's, from start to stop."""

from pathlib import Path
from typing import Any

from ...common.errors import RequestError


class WorkerProfiler:
    """The profiler of a worker's process, which records from start() to stop()."""

    def __init__(self, rank: int, device_type: str) -> None:
        self._name, self._device_type = f"rank{rank}.json", device_type
        self._running: Any = None
        self._folder = ""

    def start(self, folder: str) -> None:
        """Record from now on; RequestError where it does."""
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as torch_profile

        if self._running is not None:
            raise RequestError(f"this runtime is profiled already, into {self._folder}")
        on_device = [ProfilerActivity.CUDA] if self._device_type == "cuda" else []
        self._running, self._folder = torch_profile(activities=[ProfilerActivity.CPU, *on_device]), folder
        self._running.start()

    def stop(self) -> None:
        """Write what was recorded; RequestError where nothing is."""
        running, self._running = self._running, None
        if running is None:
            raise RequestError("this runtime is not profiled")
        running.stop()
        running.export_chrome_trace(str(Path(self._folder) / self._name))
