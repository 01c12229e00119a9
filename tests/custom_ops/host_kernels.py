"""CUDA kernels compiled as C++: host_cuda has in it what a GPU has besides the kernels' own sources."""

import shutil
import subprocess
from pathlib import Path

from lamina.custom_ops._shared.build import CSRC

SOURCES = Path(__file__).resolve().parent / "host_cuda"
COMPILER = shutil.which("c++") or shutil.which("g++")
PERSISTENT = "persistent_gemm", "persistent_shape", "persistent_epilogue"
WITH_PERSISTENT = "pipeline", "split_k_shape", "split_k_epilogue", "quad_transpose", "scaled_gemm"
SPLIT_K = "split_k_gemm", "split_k_shape", "split_k_epilogue", "scaled_gemm"
OF_NIBBLES = "gemm", "shape", "dequantize", "lane_weights", "write_out"
NIBBLES = *(f"linear_w4a16/{name}" for name in OF_NIBBLES), "quad_transpose"
# in cluster.cuh, as far as need be
OF_THE_GPU = ("hopper", "warpgroup", "cuda_mma", "pdl", "vec", "pair_ops")
OF_RANKS = ("launch", "launch_ranks", "pdl", "system_scope", "vec")  # in ranks.cuh
OF_ATTENTION = ("cuda_mma", "cache_policy", "fp8", "scaled_half")  # in attention.cuh
OF_HOPPER = *OF_THE_GPU, "cache_policy", "scaled_half", "launch"  # in hopper_attention.cuh
IN_CLUSTERS = {
    "persistent_gemm": (*PERSISTENT, *WITH_PERSISTENT),
    "linear_w4a16": (*NIBBLES, *SPLIT_K),
    "linear_w8a8": ("linear_w8a8/gemm", "quantized_values", *SPLIT_K),
    "lora": ("lora_shape", "lora_cluster", "lora_outputs"),
}


def compile_command(name: str, folder: Path, csrc: Path = CSRC) -> list[str]:
    """What compiles host_cuda/<name>.cpp, but for where to; puts into an empty folder what that includes."""
    alone: tuple[str, ...] = ("chunk", "reduce")  # without their neighbours, which are the GPU's
    if name in IN_CLUSTERS:
        alone = ("byte_formats", *IN_CLUSTERS[name])
        for header in OF_THE_GPU:
            (folder / f"{header}.cuh").write_text('#include "cluster.cuh"\n')
        (folder / "cuda_fp8.h").touch()
    if name == "all_reduce":
        alone = ("peer_packets", "peers", "reduce", "row_norm")
        for header in OF_RANKS:
            (folder / f"{header}.cuh").write_text('#include "ranks.cuh"\n')
    if name == "paged_attention":
        alone = ("kv_cache", "rotary")
        for header in OF_ATTENTION:
            (folder / f"{header}.cuh").write_text('#include "attention.cuh"\n')
        (folder / "cuda_runtime.h").touch()
    if name == "hopper_attention":
        alone = ("byte_formats", "kv_cache", "pipeline", "quad_transpose", "rotary")
        for header in OF_HOPPER:
            (folder / f"{header}.cuh").write_text('#include "hopper_attention.cuh"\n')
        (folder / "cuda_runtime.h").touch()
        (folder / "cuda_fp8.h").touch()
    for header in alone:
        shutil.copy(csrc / ("" if "/" in header else "include") / f"{header}.cuh", folder)
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
    flags.append("-fno-gnu-unique")  # each of these libraries has globals of its own
    flags.append("-U_FORTIFY_SOURCE")  # a fiber's jump to another stack is none that it knows
    flags += ["-fsanitize=shift,signed-integer-overflow,bounds", "-fsanitize-undefined-trap-on-error"]
    return [str(COMPILER), *flags, f"-I{folder}", f"-I{SOURCES}", f"-I{csrc}", str(SOURCES / f"{name}.cpp")]


def build(name: str, folder: Path, csrc: Path = CSRC) -> Path:
    """The library of host_cuda/<name>.cpp, made in an empty folder."""
    library = folder / f"{name}.so"
    subprocess.run([*compile_command(name, folder, csrc), "-o", str(library)], check=True)
    return library
