"""Seconds from starting Python to the first token, on an empty cache and on a warm one, by stages."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import workloads

RESULTS = Path(__file__).resolve().parent / "results"
COMPILERS = ("torch._dynamo", "torch._inductor", "sympy", "triton")  # what a warm start has no use for
PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn")
LIMITS: dict[str, Any] = {"memory_fraction": 0.85, "max_model_len": 16384, "max_num_seqs": 256}
SETTINGS: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "device": "cuda", **LIMITS}


def main() -> None:
    """Start each shape cold, warm, and once where any compiler is an error, each time in a new process.

    Native kernels are built before, in the user's cache, and copied: their time is apart.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("shapes", nargs="*", default=["1b", "8b"])
    parser.add_argument("--warm", type=int, default=3, help="warm starts; the median is what counts")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_start.json")
    parser.add_argument("--child", choices=STARTS, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(STARTS[options.child](options.shapes[0], options.cache)))
        return
    document: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "shapes": {}}
    for shape in options.shapes:
        found: dict[str, list[Any]] = {"cold": [], "warm": [], "no compiler": []}
        document["shapes"][shape] = found
        with tempfile.TemporaryDirectory() as cache:
            document |= in_new_process("kernels", shape, cache)
            for name in ("cold", *["warm"] * options.warm, "no compiler"):
                kind = "guarded" if name == "no compiler" else "free"
                found[name].append(in_new_process(kind, shape, cache))
                print(shape, name, json.dumps(found[name][-1]), flush=True)
                options.output.write_text(json.dumps(document, indent=1) + "\n")


def in_new_process(kind: str, shape: str, cache: str) -> dict[str, Any]:
    """What a new process says of its start, with the time that passed outside of it as well."""
    started = time.perf_counter()
    command = [sys.executable, __file__, shape, "--child", kind, "--cache", cache]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    facts: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return {"process_s": round(time.perf_counter() - started, 2), **facts}


def copy_native_kernels(_: str, cache: Path) -> dict[str, Any]:
    """Build for this GPU what the user's cache lacks, and give an otherwise empty cache those kernels."""
    import torch

    from lamina.common.store import Store
    from lamina.custom_ops._shared.build import CSRC
    from lamina.custom_ops._shared.build_cuda import build_cuda, device_architecture
    from lamina.custom_ops._shared.ledger import KERNELS

    begun = time.perf_counter()
    source, target = Store(), Store(cache)
    for path in sorted(CSRC.glob("*/cuda.cu")):
        build_cuda(path.parent.name, device_architecture(), CSRC, source)
    built = time.perf_counter()
    for key, value in source.refs(KERNELS).items():
        target.put(source.get(value["object"]))
        target.write_ref(KERNELS, key, value)
    gpu, version = torch.cuda.get_device_name(), torch.__version__
    return {"native_kernels_s": round(built - begun, 2), "gpu": gpu, "torch": version}


def start_without_compilers(shape: str, cache: Path) -> dict[str, Any]:
    """A start in which a new process or an import of a compiler raises, after `lamina warmup --check`."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event in PROCESSES or (event == "import" and str(arguments[0]).startswith(COMPILERS)):
            raise AssertionError(f"{event} {arguments[:2]} in a start that was said to be warm")

    sys.addaudithook(refuse)
    from lamina.common.progress import say_nothing
    from lamina.runtime.config import RuntimeConfig
    from lamina.runtime.startup.loader import missing

    folder = workloads.write_config(shape, cache / "shape")
    lacks = missing(RuntimeConfig(model=folder, cache_dir=cache, **SETTINGS), say_nothing)
    return {**asdict(lacks), **start(shape, cache, require_warm=True)}


def start(shape: str, cache: Path, *, require_warm: bool = False) -> dict[str, Any]:
    """Import, load with random weights, answer one prompt; the seconds of each."""
    begun = time.perf_counter()
    import torch  # so that its share is known

    torch_imported = time.perf_counter()
    from lamina import Runtime, SamplingParams

    imported = time.perf_counter()
    folder = workloads.write_config(shape, cache / "shape")
    with Runtime.from_pretrained(folder, **SETTINGS, cache_dir=cache, require_warm=require_warm) as runtime:
        loaded = time.perf_counter()
        params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0, detokenize=False)
        stream = runtime.stream(workloads.prompts(1, 128, 9)[0], params)
        tokens = list(next(stream).token_ids)
        answered = time.perf_counter()
        tokens += [token for delta in stream for token in delta.token_ids]
        startup = runtime.stats()["startup"]
        overlapped = startup.pop("overlapped")
        return {
            "python_s": round(begun - process_started(), 2),
            "import_torch_s": round(torch_imported - begun, 2),
            "import_lamina_s": round(imported - torch_imported, 2),
            "load_s": round(loaded - imported, 2),
            "first_token_s": round(answered - loaded, 3),
            "total_s": round(answered - process_started(), 2),
            "stages": {name: round(seconds, 2) for name, seconds in startup.items() if seconds >= 0.005},
            "overlapped": {name: round(seconds, 2) for name, seconds in overlapped.items()},
            "compilers_imported": [name for name in COMPILERS if name in sys.modules],
            "bytecode": bytecode_is_kept(torch),
            "tokens": tokens,
        }


def bytecode_is_kept(module: ModuleType) -> bool:
    """Whether a module was imported from bytecode; else Python compiles every source at each start."""
    spec = module.__spec__
    return spec is not None and spec.cached is not None and Path(spec.cached).is_file()


def process_started() -> float:
    """When this process was started, on the clock of time.perf_counter, to a hundredth of a second."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    seconds_after_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return seconds_after_boot - time.clock_gettime(time.CLOCK_BOOTTIME) + time.perf_counter()


STARTS = {"kernels": copy_native_kernels, "free": start, "guarded": start_without_compilers}

if __name__ == "__main__":
    main()
