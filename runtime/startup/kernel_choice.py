"""Which kernels serve a model's GEMMs: looked up, or autotuned once and kept in the store."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from ...common.errors import NotWarmError, UnsupportedError
from ...common.logging import get_logger
from ...common.progress import Progress, say_nothing
from ...common.store import Store
from ...compiler.passes.gemms import Gemm
from ...custom_ops._shared import registry
from ...custom_ops._shared.build import CSRC, hash_factors, is_built, read_sources
from ...custom_ops._shared.fp8 import FP8
from ...custom_ops._shared.quantized import INT8
from ...custom_ops.all_reduce.group import rank_0_first
from ...custom_ops.linear import _cpu, autotune, choices
from ...custom_ops.linear._cuda import EVEN
from ...custom_ops.linear.choices import Choice, Entry, Method, Site
from ...custom_ops.linear_w4a16._cuda import find_kernel as weight_only_kernel
from ...custom_ops.linear_w4a16.configs import bits_of
from ...custom_ops.linear_w8a8._cuda import find_kernel as few_rows_kernel
from ...custom_ops.mlp_w8a8._cuda import find_kernel as mlp_kernel
from ...custom_ops.scaled_linear._cuda import EVEN as EVEN_BYTES
from ...custom_ops.scaled_linear._cuda import find_kernel as scaled_kernel

ONE_ORDER = ("cpu", "cuda", "reference")  # providers of linear that know batch_invariant
SMALLEST = 1 << 20  # weights, below which a GEMM takes no longer than its launch
MEASUREMENTS = "measurements"  # the kind of the store's names for them
OPS = {  # that serve a kind of GEMM, on a GPU also by those that they are composed of
    "linear": ("linear",),
    "linear_gated": ("linear_silu_and_mul",),
    "norm": ("add_rms_norm_linear",),
    "norm_gated": ("add_rms_norm_linear", "linear_silu_and_mul"),
}
MEASURED_OPS = (
    *("linear", "linear_silu_and_mul", "add_rms_norm_linear", "scaled_linear"),
    *("linear_w8a8", "mlp_w8a8", "linear_w4a16"),
)
SOURCES = {"cuda": (".cu", ".cuh"), "cpu": (".cpp", ".h")}  # suffixes of what the kernels are made of
BY_METHOD = {Method.DOT: "dot products", Method.AMX: "AMX tiles"}
CPU = torch.device("cpu")
CPU_DTYPES = torch.bfloat16, torch.float16, torch.float32
logger = get_logger("runtime")


def choose_gemm_kernels(
    gemms: Iterable[Gemm],
    device: torch.device,
    dtype: torch.dtype,
    store: Store,
    *,
    require_warm: bool = False,
    progress: Progress = say_nothing,
) -> tuple[str, ...]:
    """One line for each GEMM and number of rows, saying what serves it; none where nothing is to choose.

    What neither the package nor the store knows is measured now, before anything is captured, and kept.
    Raises NotWarmError where require_warm and something would have to be measured.
    """
    gemms = tuple(gemms)
    serving = [OPS[gemm.kind] for gemm in gemms if gemm.weights == "dense"]
    for op in {op for ops in serving for op in (ops if device.type == "cuda" else ops[:1])}:
        registry.select(op, device=device, dtype=dtype)  # built now, not amid a request
    for kept in {gemm.weights for gemm in gemms if gemm.weights in choices.BYTES}:
        gated = any(gemm.kind == "norm_gated" for gemm in gemms if gemm.weights == kept)
        _build_for_bytes(INT8 if kept == "int8" else FP8, device, dtype, gated=gated)
    for bits in {bits for gemm in gemms if (bits := bits_of(gemm.weights)) is not None}:
        if registry.select("linear_w4a16", device=device, dtype=dtype).name == "cuda":
            weight_only_kernel(bits)
    lacks = missing_measurements(gemms, device, dtype, store)
    if lacks and require_warm:
        raise NotWarmError(f"the cache {store.root} lacks measurements of {lacks[0]}")
    if not _is_chosen(device, dtype):
        return ()
    sites = sites_of(gemms, device, dtype)
    if not require_warm:
        with rank_0_first() as is_first:
            chosen = [site for site in sites if _has_choice(site, device, dtype)]
            _settle(chosen, device, dtype, store, progress, again=is_first)
    return tuple(_described(site, device, dtype) for site in sites)


def _settle(
    sites: Sequence[Site],
    device: torch.device,
    dtype: torch.dtype,
    store: Store,
    progress: Progress,
    *,
    again: bool,
) -> None:
    """Measure and keep what is not known of these sites; again: also what was found beside other work."""
    device_name = choices.device_name_of(device, dtype)
    key = measurements_key(device, device_name, dtype)
    doubtful = [entry.site for entry in read_measurements(store, key) if again and entry.is_doubtful]
    choices.adopt(device_name, read_measurements(store, key))  # of a rank that was first
    if not {*_missing(sites, device_name), *doubtful} & {*sites}:
        return
    with store.lock(MEASUREMENTS):  # of processes that start at once the first measures for all
        known = {entry.site: entry for entry in read_measurements(store, key)}
        choices.adopt(device_name, known.values())
        once_more = [site for site in sites if again and site in known and known[site].is_doubtful]
        for entry in _measure([*_missing(sites, device_name), *once_more], device, dtype, progress):
            known[entry.site] = min(entry, known.get(entry.site, entry), key=lambda one: one.spread)
        choices.adopt(device_name, known.values())
        entries = [entry.to_json() for entry in known.values()]
        store.remember(MEASUREMENTS, key, {"device": device_name, "entries": entries})


def _build_for_bytes(kept: torch.dtype, device: torch.device, dtype: torch.dtype, *, gated: bool) -> None:
    """Build what multiplies weights of one byte in a format, where kernels of ours do."""
    if registry.select("linear_w8a8", device=device, dtype=dtype).name == "cuda":
        few_rows_kernel(kept)
    if registry.select("scaled_linear", device=device, dtype=kept).name == "cuda":
        scaled_kernel(kept)
    if gated and registry.select("mlp_w8a8", device=device, dtype=kept).name == "cuda":
        mlp_kernel(kept)


def require_one_order(device: torch.device, dtype: torch.dtype) -> None:
    """Raise UnsupportedError where GEMMs of this dtype are summed in an order by the number of rows."""
    selected = registry.select("linear", device=device, dtype=dtype)
    if selected.name not in ONE_ORDER:
        raise UnsupportedError(
            f"batch_invariant is True, and GEMMs in {dtype} on {device.type} are served by {selected.name} "
            f"({selected.reason}), which sums by the number of rows; leave the mode, or run on a CPU"
        )


def missing_measurements(
    gemms: Iterable[Gemm], device: torch.device, dtype: torch.dtype, store: Store
) -> list[str]:
    """What would have to be measured before these GEMMs are served, one line each."""
    if device.type == "cpu" and not is_built("linear"):
        return []  # without the kernel, which is missing itself, nothing can be known
    if not _is_chosen(device, dtype):
        return []
    device_name = choices.device_name_of(device, dtype)
    choices.adopt(device_name, read_measurements(store, measurements_key(device, device_name, dtype)))
    sites = [site for site in sites_of(gemms, device, dtype) if _has_choice(site, device, dtype)]
    return [f"kernels of {site}" for site in _missing(sites, device_name)]


def describe_cpu_kernels(store: Store) -> tuple[str, ...]:
    """One line a dtype and what was measured in it: which kernels serve GEMMs on this CPU, and at what.

    None where the kernels are not built yet.
    """
    if not is_built("linear"):
        return ()
    return tuple(line for dtype in CPU_DTYPES for line in _cpu_kernels_of(dtype, store))


def _cpu_kernels_of(dtype: torch.dtype, store: Store) -> Iterator[str]:
    most = {" or ".join(map(_named, _cpu.ways(dtype, rows))): rows for rows in (1, *choices.BUCKETS)}
    *few, beyond = most
    served = [*(f"{ways} up to {most[ways]} rows" for ways in few), f"{beyond} beyond"]
    yield f"{choices.name_of(dtype)}: {', '.join(served)}"
    device_name = choices.device_name_of(CPU, dtype)
    known = read_measurements(store, measurements_key(CPU, device_name, dtype))
    choices.adopt(device_name, known)
    yield from (_described(entry.site, CPU, dtype) for entry in known)


def measurements_kept(device: torch.device, dtype: torch.dtype, store: Store) -> tuple[str, ...]:
    """The names under which the store has what was measured on this device."""
    if not _is_chosen(device, dtype):
        return ()
    key = measurements_key(device, choices.device_name_of(device, dtype), dtype)
    return () if store.read_ref(MEASUREMENTS, key) is None else (key,)


def _is_chosen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels to choose from."""
    return registry.select("linear", device=device, dtype=dtype).name == device.type


def _missing(sites: Iterable[Site], device_name: str) -> list[Site]:
    return [site for site in sites if not choices.is_measured(site, device_name)]


def _has_choice(site: Site, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether anything depends on what is measured."""
    return device.type != "cpu" or len(_cpu.ways(dtype, site.num_tokens)) > 1


def _described(site: Site, device: torch.device, dtype: torch.dtype) -> str:
    if device.type == "cpu":
        choice = _cpu.choice_of(site, dtype)
    else:
        choice = choices.choose(site, choices.device_name_of(device, dtype))
    return f"{site}: {_served_by(choice)} ({choice.reason})"


def _served_by(choice: Choice) -> str:
    if choice.kernel is None:
        return "the ops it stands for"
    if isinstance(choice.kernel, Method):
        return _named(choice.kernel)
    return f"the CUDA kernel, {choice.kernel}"


def _named(way: Method | None) -> str:
    return "the library" if way is None else BY_METHOD[way]


def sites_of(gemms: Iterable[Gemm], device: torch.device, dtype: torch.dtype) -> tuple[Site, ...]:
    """Every kernel that might serve the GEMMs, for every number of rows that a choice is made for."""
    worth = [gemm for gemm in gemms if gemm.rows * gemm.columns >= SMALLEST]
    found = [site for gemm in worth for site in _sites_of(gemm, device, dtype)]
    return tuple(site for site in dict.fromkeys(found) if _may_serve(site, device, dtype))


def _sites_of(gemm: Gemm, device: torch.device, dtype: torch.dtype) -> tuple[Site, ...]:
    shape = gemm.rows, gemm.columns, choices.name_of(dtype), gemm.weights
    if not gemm.batch_invariant:
        return choices.sites_of(gemm.kind, *shape)
    if device.type == "cpu":
        return ()  # one method for every number of rows
    split_k = choices.one_order(gemm.rows, gemm.columns, choices.processors_of(device))
    return choices.sites_of(
        "gated" if gemm.kind in ("linear_gated", "norm_gated") else gemm.kind, *shape, split_k
    )


def _may_serve(site: Site, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel of ours is a candidate for a site."""
    if device.type == "cpu":
        return site.weights == "dense" and bool(_cpu.methods(dtype, site.num_tokens))
    even = EVEN_BYTES if site.is_in_bytes else EVEN
    return site.k % even == 0 and bool(autotune.candidates_of(site, choices.processors_of(device)))


def measurements_key(device: torch.device, device_name: str, dtype: torch.dtype) -> str:
    """The name of what was measured on a device with the kernels as they are now."""
    suffixes = SOURCES[device.type]
    sources = [read_sources(op, CSRC, suffixes) for op in MEASURED_OPS]
    return hash_factors(MEASUREMENTS, device_name, str(dtype), torch.__version__, sources)


def read_measurements(store: Store, key: str) -> tuple[Entry, ...]:
    """What the store holds of this name; nothing where it cannot be read."""
    record = store.read_ref(MEASUREMENTS, key)
    if record is None:
        return ()
    try:
        return tuple(choices.parse_entry(line) for line in record["entries"])
    except (TypeError, ValueError, KeyError) as error:
        logger.warning("measurements in the cache could not be used and are made again: %r", error)
        return ()


def _measure(
    sites: Sequence[Site], device: torch.device, dtype: torch.dtype, progress: Progress
) -> tuple[Entry, ...]:
    if not sites:
        return ()
    logger.info("autotuning %d GEMMs on %s, once", len(sites), choices.device_name_of(device, dtype))
    progress("autotune", 0.0, f"{len(sites)} GEMMs")
    try:
        return autotune.autotune(sites, device, dtype)
    except torch.OutOfMemoryError as error:
        logger.warning("GEMMs could not be autotuned, torch's own kernels serve them: %s", error)
        return ()
    finally:
        torch.cuda.empty_cache()  # what measuring took is room for the cache
