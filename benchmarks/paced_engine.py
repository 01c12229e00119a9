"""`lamina` with an engine that is held to a pace: `python paced_engine.py TOKENS_A_SECOND serve MODEL …`."""

import sys
import time
from typing import Any


def main() -> None:
    """Run the command line; an engine in a process of its own is told its pace by what that runs first."""
    from lamina.__main__ import main as run
    from lamina.runtime import child_process

    rate = float(sys.argv.pop(1))
    if "thread" in sys.argv:
        pace(rate)
    else:
        first = (
            f"import sys; sys.path[:] = sys.argv[COUNT:]; import paced_engine; paced_engine.pace({rate}); "
        )
        child_process.BOOT = first + child_process.BOOT
    run()


def pace(rate: float) -> None:
    """Have engines here wait after a step until its tokens are due; time that is lost stays lost."""
    from lamina.runtime.engine.core_loop import CoreLoop

    step, due = CoreLoop._step, 0.0

    def paced(loop: Any) -> None:
        nonlocal due
        step(loop)
        num_tokens = sum(len(output.new_token_ids) for output in loop._core.outputs)
        now = time.monotonic()
        due = max(due + num_tokens / rate, now)
        time.sleep(due - now)

    CoreLoop._step = paced  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
