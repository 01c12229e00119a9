"""Memory that is refused while a model loads, by a limit of the process, is one error with a remedy."""

import resource
import subprocess
import sys

from ...cli.test_process import run, told

SCRIPT = """
import resource, sys
from pathlib import Path
from lamina import LoadError, Runtime
from lamina.runtime.config import RuntimeConfig

def limit(stage, fraction, detail):
    if stage == "weights" and fraction == 1:  # the KV cache takes 1.5 GiB, later
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))

settings = {"compile": False, "device": "cpu", "num_kv_blocks": 200_000}
try:
    Runtime(RuntimeConfig(model=sys.argv[1], **settings), limit)
except LoadError as error:
    print(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
settings["num_kv_blocks"] = 20
with Runtime(RuntimeConfig(model=sys.argv[1], **settings)) as runtime:
    print(len(runtime.generate([[1, 2, 3]])))
"""


def test_a_runtime_says_what_memory_was_for_and_another_one_works(tiny_folder):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tiny_folder)], capture_output=True, text=True)
    error, answers = done.stdout.splitlines() or [done.stderr, ""]
    assert error.startswith(f"memory ran out while {tiny_folder} was loaded: ")
    assert error.endswith(
        "; lower num_kv_blocks or memory_fraction, use a smaller dtype, or give the process more"
    )
    assert answers == "1"


def test_a_command_says_so_in_one_line(tiny_folder, tmp_path):
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        with open(tmp_path / "model" / name, "wb") as file:
            file.truncate(1 << 40)  # no blocks of a disk
    limit = 64 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]
    code, _, errors = run(
        "info", tmp_path / "model", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit)
    )
    assert (code, len(told(errors))) == (2, 1), errors
    assert told(errors)[0].startswith("lamina: memory ran out: ")
