"""A deep stack that memory is refused to is an error, never a wait without end."""

import subprocess
import sys

SCRIPT = """
import os, resource, time
from pathlib import Path
from lamina.runtime.structured_output.deep_stack import STACK, call_deep

outcomes, num_threads = set(), len(os.listdir("/proc/self/task"))
assert call_deep(lambda: "returned") == "returned"
for beyond_the_stack in range(0, 1 << 20, 1 << 12):
    while len(os.listdir("/proc/self/task")) > num_threads:  # the last one still has its stack
        time.sleep(0.001)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + STACK + beyond_the_stack, resource.RLIM_INFINITY))
    try:
        outcomes.add(call_deep(lambda: "returned"))
    except MemoryError:
        outcomes.add("refused")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(*sorted(outcomes))
"""


def test_wherever_memory_ends_around_the_start_of_the_thread_the_caller_goes_on():
    """Between a stack that can be had and the first line of its thread Python allocates more."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["refused", "returned"], done.stderr[-2000:]
