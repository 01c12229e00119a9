"""Every environment variable Lamina reads or sets, and nothing else touches any."""

import atexit
import functools
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .errors import ConfigError

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def cache_root() -> Path:
    """LAMINA_CACHE_DIR, else a checkout's cache_dir/, else the user's cache folder.

    Where the user has none, or it cannot be made, it is a private folder that ends with the process, which is
    logged once. Raises ConfigError for a chosen folder whose path cannot be resolved.
    """
    chosen = os.environ.get("LAMINA_CACHE_DIR")
    if chosen:
        return absolute("LAMINA_CACHE_DIR", chosen)
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "cache_dir" / ".gitkeep").exists():
        return checkout / "cache_dir"
    try:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        folder = absolute("XDG_CACHE_HOME", base) / "lamina"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError, ConfigError) as error:  # RuntimeError: a user without a home
        return _private_cache(str(error))
    return folder


def absolute(name: str, path: str | Path) -> Path:
    """A path from the root, ~ written out; ConfigError where there is no home or no current folder."""
    try:
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        got = f"{name} is {str(path)[:200]!r}, which has no place"
        raise ConfigError(f"{got}: {error}; wanted a path from /") from error


@functools.cache
def _private_cache(why: str) -> Path:
    """A folder of this process alone, removed at its end."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="lamina-cache-"))
    except OSError as error:
        raise ConfigError(f"there is no place for a cache: {why}; {error}; set LAMINA_CACHE_DIR") from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    message = "no cache folder can be had (%s): what is made ends with this process; set LAMINA_CACHE_DIR"
    logging.getLogger("lamina.store").warning(message, why)
    return folder


def log_level() -> str:
    """LAMINA_LOG_LEVEL, one of DEBUG, INFO, WARNING (default), ERROR."""
    level = os.environ.get("LAMINA_LOG_LEVEL", "WARNING").upper()
    if level not in LOG_LEVELS:
        raise ConfigError(f"LAMINA_LOG_LEVEL is {level!r}; wanted one of {', '.join(LOG_LEVELS)}")
    return level


def cxx_compiler() -> str | None:
    """CXX, the C++ compiler to use, or None to look for one on PATH."""
    return os.environ.get("CXX") or None


def with_temporary_files_in(folder: Path) -> dict[str, str]:
    """The environment of a process that keeps its temporary files in this folder."""
    return {**os.environ, "TMPDIR": str(folder)}


def cuda_home() -> str | None:
    """CUDA_HOME, the folder of the CUDA toolkit to use, or None to look for one."""
    return os.environ.get("CUDA_HOME") or None


def omp_threads() -> str | None:
    """The variable that says how many threads OpenMP uses, as NAME=value, or None."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return next((f"{name}={os.environ[name]}" for name in names if os.environ.get(name)), None)


def omp_binding() -> str | None:
    """OMP_PROC_BIND or OMP_PLACES, which bind threads to cores, as NAME=value, or None."""
    names = ("OMP_PROC_BIND", "OMP_PLACES")
    return next((f"{name}={os.environ[name]}" for name in names if os.environ.get(name)), None)


def visible_gpus() -> list[str] | None:
    """CUDA_VISIBLE_DEVICES, the GPUs that this process may use, by number or UUID; None: all there are."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [each.strip() for each in visible.split(",") if each.strip()]


def with_gpus(gpus: Sequence[str]) -> dict[str, str]:
    """Returns this process's environment for another one that is to use these GPUs alone."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def gloo_over_loopback() -> None:
    """Have gloo talk over loopback, whatever the machine's name resolves to; a user's own choice wins."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def gloo_over(interface: str) -> None:
    """Have gloo talk over a network interface; a user's own choice wins."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def nccl_without_multicast() -> None:
    """Have NCCL leave sums to GPUs, not to the switch between them; a user's own choice wins."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


def ray_address() -> str | None:
    """RAY_ADDRESS, the Ray cluster to use, or None to start one."""
    return os.environ.get("RAY_ADDRESS") or None


def ray_of_its_own() -> None:
    """Have a Ray cluster that this process starts report to nobody, and know its own by a token that is in
    no file; a user's own choice wins."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def hub_token() -> str | None:
    """HF_TOKEN, the access token for model hubs."""
    return os.environ.get("HF_TOKEN") or None


def api_keys() -> str:
    """LAMINA_API_KEY, the keys that `lamina serve` asks for, separated by commas; empty without any."""
    return os.environ.get("LAMINA_API_KEY", "")


def keep_flash_attention_kernels(folder: Path) -> None:
    """Have flash-attn-4, which reads this at import, keep what it compiles; a user's own choice wins."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))


def keep_triton_kernels(folder: Path) -> None:
    """Have Triton keep what it compiles; a user's own choice wins."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder))


def triton_cache() -> Path:
    """TRITON_CACHE_DIR, where Triton keeps what it compiles; keep_triton_kernels has set it."""
    return Path(os.environ["TRITON_CACHE_DIR"])
