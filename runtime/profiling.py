"""What a runtime's workers do, kernel by kernel: traces of torch's profiler, a file a rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runtime import Runtime


@contextmanager
def profile(runtime: "Runtime", folder: str | Path) -> Iterator[Path]:
    """Records what every worker computes meanwhile; yields the folder that has rank0.json and so on then.

    They are Chrome traces, as Perfetto and chrome://tracing open them, of kernels and of torch's calls. Steps
    are slower while they are recorded. RequestError where this runtime is recorded already.
    """
    path = Path(folder).expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True)

    def ask(method: str, *arguments: Any) -> None:
        runtime._client.look(lambda: runtime._open.executor.collective_rpc(method, *arguments))

    ask("start_profile", str(path))
    try:
        yield path
    finally:
        ask("stop_profile")
