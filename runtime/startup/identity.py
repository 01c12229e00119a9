"""What the bits of answers depend on, as one short text: equal ones mean equal answers to equal requests."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from . import warm_manifest as warm
from .description import settings_in_force
from .loaded import LoadedRuntime, LoadedWorker

NUM_SAMPLES = 64  # places of a file that are looked at: to read all of it would take as long as loading
SAMPLE_BYTES = 4096


def system_fingerprint(loaded: LoadedRuntime) -> str:
    """Returns "fp_" and 24 hexadecimal digits: of weights, settings, compiled code, kernels and machine.

    "fp_batch_invariant_" where answers depend on nothing else, not on what ran beside them.
    """
    resolved = loaded.resolved
    factors: dict[str, Any] = {
        "settings": settings_in_force(loaded),
        "serving": warm.serving_factors(resolved, resolved.plan_factors()),
        "machine": _machine(resolved.device),
        "weights": loaded.executor.collective_rpc("weight_identity"),
        "drafter": None if resolved.drafter is None else resolved.drafter.model.architecture,
    }
    text = json.dumps(factors, sort_keys=True, default=str)
    mode = "batch_invariant_" if resolved.config.batch_invariant else ""
    return f"fp_{mode}{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def weight_identity(worker: LoadedWorker) -> str:
    """Returns a digest of where a worker's weights came from, or of themselves where they were given."""
    source = worker.runner.own_weights.source
    return str(source.digest) if source.folder is None else _digest(source.folder)


def _machine(device: torch.device) -> list[Any]:
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)]
    return [torch.backends.cpu.get_cpu_capability()]


def _digest(folder: Path) -> str:
    """Returns a digest of the names, sizes and samples of a folder's files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for sample in range(NUM_SAMPLES + 1):
                file.seek(max(size - SAMPLE_BYTES, 0) * sample // NUM_SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
