"""A deep stack that memory is refused to is an error, never a wait without end."""

import subprocess
import sys

SCRIPT = """
import resource
from pathlib import Path
from lamina.runtime.structured_output.deep_stack import call_deep

assert call_deep(lambda: "returned") == "returned"  # its stack is kept by the C library, for the next ones
outcomes = set()
for left in range(-4 << 20, 2 << 20, 1 << 14):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + left, resource.RLIM_INFINITY))
    try:
        outcomes.add(call_deep(lambda: "returned"))
    except MemoryError:
        outcomes.add("refused")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(*sorted(outcomes - {"returned"}), call_deep(lambda: "returned"))
"""


def test_wherever_memory_ends_around_the_start_of_the_thread_the_caller_goes_on():
    """Between a stack that can be had and the first line of its thread Python allocates more."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["refused", "returned"], done.stderr[-2000:]
