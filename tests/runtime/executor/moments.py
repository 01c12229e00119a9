"""Moments of a worker's life, named by the function that begins there, and what happens to it then."""

import dataclasses
import random
from pathlib import Path

# (the function, its first call that counts and its last), by what its worker does meanwhile.
POINTS = {
    "loading": [
        ("_config", 1, 1),
        ("GlooGroup.__init__", 1, 1),
        ("resolve_runtime", 1, 1),
        ("GlooGroup.broadcast_object", 1, 2),
        ("read_weights", 1, 1),
        ("select_attention", 1, 1),
        ("build_worker", 1, 1),
    ],
    "compiling": [
        ("compile_program", 1, 1),
        ("capture", 1, 1),
        ("compile_piece", 1, 3),
        ("run_source", 1, 2),
        ("Popen._execute_child", 1, 2),
        ("Popen.wait", 1, 2),
        ("Store.put", 1, 12),
        ("Store._write", 1, 12),
        ("save_plan", 1, 1),
    ],
    "warming up": [("ModelRunner.profile", 1, 1), ("note_use", 1, 1), ("note", 1, 1), ("note_name", 1, 1)],
    "prefilling": [("ModelRunner.execute", 1, 2), ("InputBatch.write", 1, 2), ("LaunchedStep.read", 1, 1)],
    "decoding": [
        ("ModelRunner.execute", 3, 60),
        ("WorkerLoop._execute", 3, 60),
        ("LaunchedStep.read", 3, 40),
        ("_Line.send", 9, 40),
    ],
    "idle": [("", 1, 1)],
    "ending": [("ModelRunner.close", 1, 1), ("set_group", 2, 2), ("GlooGroup.close", 1, 1)],
}
OF_RANK_0 = ("LaunchedStep.read", "_Line.send")  # which alone answers
OF_TWO = ("GlooGroup.__init__", "GlooGroup.broadcast_object", "set_group", "GlooGroup.close")
# What a worker runs before its own program.
HOOK = """
import os, signal, sys, threading, time
import lamina.runtime.startup.ranks  # what takes long is not looked at
def hook(name, number, action, witness):
    whom = os.getpid() if action == "kill" else os.getppid()
    calls = [0]
    def look(frame, event, arg):
        if event != "call" or frame.f_code.co_qualname != name or "site-packages" in frame.f_code.co_filename:
            return
        calls[0] += 1
        if calls[0] == number:
            with open(witness, "w") as file:
                file.write(str(time.monotonic()))
            os.kill(whom, signal.SIGKILL if action == "kill" else signal.SIGINT)
    threading.setprofile(look)
    sys.setprofile(look)
if int(sys.argv[2]) == RANK:
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """The call of a function on a rank, at which that is killed, or its parent interrupted."""

    stage: str
    point: str
    number: int
    rank: int
    ranks: int
    action: str = "kill"

    @property
    def is_cold(self) -> bool:
        """Whether there is something to compile."""
        return self.stage == "compiling"

    def prelude(self, witness: Path) -> str:
        """Code for the worker; it writes the time there before it acts."""
        if not self.point:
            return ""
        call = f"    hook({self.point!r}, {self.number}, {self.action!r}, {str(witness)!r})"
        return f"exec({HOOK.replace('RANK', str(self.rank)) + call!r}); "


def moments(seed: int, count: int, action: str = "kill") -> list[Moment]:
    """As many moments, the same for a seed, all stages in turn."""
    chance, found = random.Random(seed), []
    for number in range(count):
        stage = [*POINTS][number % len(POINTS)]
        point, first, last = chance.choice(POINTS[stage])
        ranks = 2 if point in OF_TWO else chance.choice((1, 2, 2))
        rank = 0 if point in OF_RANK_0 else chance.randrange(ranks)
        if stage == "compiling":  # of several ranks the first to come compiles, whichever that is
            ranks, rank = 1, 0
        found.append(
            Moment(
                stage=stage,
                point=point,
                number=chance.randint(first, last),
                rank=rank,
                ranks=ranks,
                action=action,
            )
        )
    return found
