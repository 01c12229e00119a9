"""`lamina info`: what this machine offers and where things are kept."""

import json
import os
import platform
import subprocess
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common import env
from ..common.errors import KernelBuildError
from . import options

if TYPE_CHECKING:
    from ..runtime.config import RuntimeConfig
    from ..runtime.startup.memory_report import StageSize

LIBRARIES = ("lamina", "torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy")


@options.spread
def info(
    settings: options.Settings,
    model: options.Model = None,
    as_json: options.Json = False,
) -> None:
    """Show the machine, its compiler and GPUs, the versions, the cache folder, and what of a model fits."""
    facts = describe_machine(settings["cache_dir"])
    if model is not None or settings["model_option"] is not None:
        facts |= describe_fit(settings.config(model, load_format="dummy"))
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {_as_text(value)}")


def describe_machine(cache_dir: str | None = None) -> dict[str, Any]:
    """Facts about this machine by name, as plain data."""
    import torch

    from ..runtime.startup.control_groups import memory_limit
    from ..runtime.startup.memory import available_bytes
    from ..runtime.startup.threads import choose_threads

    threads = choose_threads()
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    root = env.cache_root() if cache_dir is None else Path(cache_dir).expanduser().resolve()
    limit = memory_limit()
    return {
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads.count,
        "threads_because": threads.reason,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(page * pages / 2**30, 1),
        "memory_limit_gib": None if limit is None else round(limit / 2**30, 2),
        "memory_available_gib": round(available_bytes(torch.device("cpu")) / 2**30, 2),
        "gpus": _gpus(),
        "compiler": _compiler(),
        "python": platform.python_version(),
        "python_headers": Path(sysconfig.get_path("include"), "Python.h").exists(),
        "versions": {name: _version(name) for name in LIBRARIES},
        "gemm_kernels": _gemm_kernels(root),
        "cache_dir": str(root),
        "cache_mib": round(_folder_bytes(root) / 2**20, 1),
    }


def _gemm_kernels(root: Path) -> list[str]:
    """What serves GEMMs on the CPU, and what it was measured at; nothing where no kernel was built yet."""
    from ..common.store import Store
    from ..custom_ops._shared.ledger import LEDGER
    from ..runtime.startup.kernel_choice import describe_cpu_kernels

    if not root.is_dir():
        return []
    LEDGER.keep_in(Store(root))
    return list(describe_cpu_kernels(LEDGER.store))


def _version(name: str) -> str | None:
    """None for what is not installed, as Lamina itself where a checkout is used as it is."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def describe_fit(config: "RuntimeConfig") -> dict[str, Any]:
    """Whether the longest requests fit, by the model's config alone; one from a hub is fetched first."""
    from ..runtime.startup.loader import sizing
    from .progress import loading_progress

    with loading_progress() as progress:
        fit = sizing(config, progress)
    return {
        "model": str(config.model),
        "ranks": fit.ranks,
        **({"stages": [_describe_stage(stage) for stage in fit.stages]} if fit.stages else {}),
        "quantization": list(fit.quantization),
        "weights_gib": round(fit.weight_bytes / 2**30, 2),
        "penalties_mib": round(fit.adjusting_bytes / 2**20, 1),
        "cache_tokens": fit.capacity_tokens,
        "cache_dtype": str(fit.kv_cache_dtype).removeprefix("torch."),
        "cache_kib_per_token": round(fit.token_bytes / 2**10, 1),
        "swap_gib": round(fit.swap_bytes / 2**30, 2),
        "missing_gib": round(fit.missing_bytes / 2**30, 2),
        "fit": fit.sentence(),
    }


def _describe_stage(stage: "StageSize") -> dict[str, Any]:
    return {
        "layers": f"{stage.first_layer}-{stage.last_layer}",
        "weights_gib": round(stage.weight_bytes / 2**30, 2),
        "cache_kib_per_token": round(stage.token_bytes / 2**10, 1),
    }


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    if isinstance(value, list):
        texts = [_as_text(one) if isinstance(one, dict) else one for one in value]
        return ("; " if any("," in one for one in texts) else ", ").join(texts) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    import torch

    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in properties]


def _compiler() -> str | None:
    """The first line with which the C++ compiler that kernels are built with names itself."""
    from ..custom_ops._shared.build import find_compiler

    try:
        command = find_compiler()
    except KernelBuildError:
        return None
    said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
    return said.partition("\n")[0]


def _folder_bytes(folder: Path) -> int:
    paths = folder.rglob("*") if folder.is_dir() else ()
    return sum(path.stat().st_size for path in paths if path.is_file())
