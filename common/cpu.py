"""What the CPU at hand is, for whatever is compiled for it alone."""

import functools
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
WANTED = ("flags", "Features", "model", "model name", "CPU part")


@functools.cache
def instruction_set(source: Path = CPUINFO) -> str:
    """What -march=native looks at: the CPU's model and feature flags. Code made for others may not run."""
    try:
        lines = source.read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(dict.fromkeys(line for line in lines if line.partition("\t")[0].strip() in WANTED))
