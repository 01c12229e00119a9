"""Workers are scheduled as the process that started them, where the kernel weighs whole sessions."""

import subprocess
import sys
from pathlib import Path

import pytest

OWN = Path("/proc/self/autogroup")
PARENT = """
import subprocess
from pathlib import Path
from lamina.runtime.child_process import share_scheduling
Path("/proc/self/autogroup").write_text("3")
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
try:
    share_scheduling(child.pid)
    print(Path(f"/proc/{child.pid}/autogroup").read_text())
finally:
    child.kill()
"""


@pytest.mark.skipif(not OWN.exists(), reason="this kernel weighs no sessions")
def test_a_session_of_a_child_is_as_nice_as_that_of_its_parent() -> None:
    found = subprocess.run(
        [sys.executable, "-c", PARENT], start_new_session=True, capture_output=True, text=True, check=True
    )
    assert found.stdout.split()[1:] == ["nice", "3"]
