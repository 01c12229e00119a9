"""Kernels of a CPU compiled while the model is traced: Python takes one core, the compiler others."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ...common.errors import LaminaError
from ...custom_ops._shared.build import prepare_kernel
from ..speculation.config import NGram
from .resolved import ResolvedRuntime
from .threads import usable_cpus

ATTENTION = "paged_attention", "rotary_and_write_kv_cache", "write_kv_cache"


def kernels_ahead(resolved: ResolvedRuntime) -> tuple[str, ...]:
    """Ops whose kernels a start on a CPU calls, those that the compiler's proofs need first."""
    if resolved.device.type != "cpu" or resolved.config.require_warm:
        return ()
    schemes = [scheme for scheme, _ in resolved.schemes.by_scheme()]
    kept = dict.fromkeys(scheme.op for scheme in schemes if scheme.op is not None)
    is_compiled = resolved.config.compile_config is not None
    normed = ("add_rms_norm_linear",) if is_compiled and not schemes else ()
    attention = ATTENTION if resolved.config.attention in ("auto", "cpu") else ()
    drafted = ("propose_ngram",) if isinstance(resolved.config.speculative, NGram) else ()
    return (*kept, *normed, *attention, *drafted, "linear", "sample", "adjust_logits")


@contextlib.contextmanager
def building_ahead(resolved: ResolvedRuntime) -> Iterator[None]:
    """Kernels are compiled beside what the block does, which finds them or waits for the one under way."""
    workers = max(1, len(usable_cpus()) - 1)
    with ThreadPoolExecutor(workers, thread_name_prefix="lamina-build") as pool:
        try:
            for op in kernels_ahead(resolved):
                pool.submit(_prepare, op)
            yield
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _prepare(op: str) -> None:
    with contextlib.suppress(LaminaError):  # whoever calls the kernel meets the same, and says so
        prepare_kernel(op)
