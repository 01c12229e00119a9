"""Runs mutants, each in a child of one process that has imported what tests need."""

import contextlib
import enum
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from math import gcd
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from lamina.custom_ops._shared.build import CSRC

from .rules import Mutant, mutants_of
from .targets import Target, compiled, lay_out, targets

PATIENCE, SLOWER = 20.0, 4.0  # seconds, and times the tests' usual ones, after which a mutant hangs
WITHOUT_RESULTS = {"include/buffer.h"}  # hands out memory, of which more or less changes no result
PASSED, FAILED = 0, 1  # pytest's own
NO_CPP, SAME, BROKEN = 40, 41, 42
KILLER = "killer"

settings.register_profile(  # what fails need not be made small
    "mutants",
    max_examples=20,
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)


class Verdict(enum.Enum):
    """What became of a mutant."""

    KILLED = "killed"
    LIVES = "lives"
    SAME = "same"  # the compiler makes the same of it
    NO_CPP = "no C++"
    ARGUED = "argued"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A mutant of a source, and the libraries with that source in them."""

    file: str  # in csrc
    mutant: Mutant
    targets: tuple[Target, ...]

    @property
    def folder(self) -> str:
        """What its figures are reported under: the op and the language, or the header."""
        path = Path(self.file)
        kind = "CUDA" if path.suffix in (".cuh", ".cu") else "C++"
        return self.file if path.parent.name == "include" else f"{path.parent.name} ({kind})"

    @property
    def name(self) -> str:
        """The same for the same mutant wherever its lines lie."""
        mutant = self.mutant
        number = f" (the {mutant.occurrence + 1}.)" if mutant.occurrence else ""
        return f"{self.file}: {mutant.old_line} => {mutant.new_line}{number}"


def cases(ops: Sequence[str] | None) -> list[Case]:
    """Every mutant of the sources asked for that a library of this machine has, a file after another."""
    homes: dict[str, dict[Target, set[int]]] = {}
    for target in targets():
        for file, lines in target.lines().items():
            homes.setdefault(file, {})[target] = lines
    found: list[list[Case]] = []
    for file in sorted(homes.keys() - WITHOUT_RESULTS):
        if ops is not None and file not in ops and Path(file).parent.name not in ops:
            continue
        found.append([])
        for mutant in mutants_of((CSRC / file).read_text()):
            having = tuple(target for target, lines in homes[file].items() if mutant.line in lines)
            if having:
                found[-1].append(Case(file=file, mutant=mutant, targets=having))
    return [
        case for one_each in zip_longest(*map(_far_apart, found)) for case in one_each if case is not None
    ]


def _far_apart(cases: list[Case]) -> list[Case]:
    """The cases of a file, each far from the one before: the first few are from all over it."""
    stride = max(1, round(len(cases) * 0.618))
    while gcd(stride, len(cases)) > 1:
        stride += 1
    return [cases[i * stride % len(cases)] for i in range(len(cases))]


@dataclass(slots=True)
class _Child:
    case: Case
    left: list[Target]  # the first is run
    until: float
    folder: Path
    is_same: bool = True  # in all libraries so far
    pid: int = 0


@dataclass(slots=True)
class _Pool:
    jobs: int
    root: Path
    baselines: dict[Target, tuple[bytes, float]] = field(default_factory=dict)
    running: dict[int, _Child] = field(default_factory=dict)
    kills: dict[Target, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # of each test

    def measure(self, wanted: Sequence[Target]) -> None:
        """Every library as it is must pass its tests; how long that takes."""
        for target in wanted:
            folder = Path(tempfile.mkdtemp(dir=self.root))
            library = compiled(target, CSRC, folder)
            if library is None:
                sys.exit(f"{target.name} does not compile")
            started = time.monotonic()
            _, status = os.waitpid(_forked(partial(_test, target, library, Counter())), 0)
            if os.waitstatus_to_exitcode(status) != PASSED:
                sys.exit(f"{target.name} fails its own tests unchanged: {status}")
            taken = time.monotonic() - started
            print(f"{target.name}: {taken:.1f} s", flush=True)
            self.baselines[target] = library.read_bytes(), taken

    def start(self, case: Case, left: list[Target], is_same: bool) -> None:
        folder = Path(tempfile.mkdtemp(dir=self.root))
        library, taken = self.baselines[left[0]]
        child = _Child(case, left, 0.0, folder, is_same)
        child.pid = _forked(partial(_try, case, left[0], folder, library, self.kills[left[0]]))
        child.until = time.monotonic() + PATIENCE * max(1, self.jobs / 4) + SLOWER * taken
        self.running[child.pid] = child

    def wait(self) -> tuple[_Child, int]:
        """A child that has ended, and its exit code; one that hangs counts as failed."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                child = self.running.pop(pid)
                _kill_group(pid)  # what it started
                if (killer := child.folder / KILLER).exists():
                    self.kills[child.left[0]][killer.read_text()] += 1
                shutil.rmtree(child.folder, ignore_errors=True)
                return child, os.waitstatus_to_exitcode(status)
            for child in self.running.values():
                if time.monotonic() > child.until:
                    _kill_group(child.pid)
            time.sleep(0.01)


def run_all(todo: Sequence[Case], jobs: int, deadline: float) -> Iterator[tuple[Case, Verdict]]:
    """Each mutant with its verdict, as they come; none is begun after the deadline."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # fork beside threads that torch started
    with tempfile.TemporaryDirectory() as root:
        pool, queue = _Pool(jobs, Path(root)), deque(todo)
        pool.measure(list(dict.fromkeys(target for case in todo for target in case.targets)))
        while pool.running or (queue and time.monotonic() < deadline):
            if queue and len(pool.running) < jobs and time.monotonic() < deadline:
                case = queue.popleft()
                pool.start(case, list(case.targets), is_same=True)
                continue
            child, code = pool.wait()
            verdict = _verdict(child, code)
            if verdict is None:
                pool.start(child.case, child.left[1:], child.is_same and code == SAME)
            else:
                yield child.case, verdict


def _verdict(child: _Child, code: int) -> Verdict | None:
    """None where another library may know better."""
    if code == BROKEN or code in (2, 3, 4, 5):
        raise RuntimeError(f"the tests of {child.left[0].name} ended with {code} over {child.case.name}")
    if code == NO_CPP:
        return Verdict.NO_CPP
    if code not in (PASSED, SAME):
        return Verdict.KILLED  # failed, crashed or hung
    if len(child.left) > 1:
        return None
    return Verdict.SAME if child.is_same and code == SAME else Verdict.LIVES


def _forked(work: Callable[[], int]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = BROKEN
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        quiet = os.open(os.environ.get("MUTANT_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _try(case: Case, target: Target, folder: Path, baseline: bytes, kills: Counter[str]) -> int:
    lay_out(folder / "csrc", case.file, case.mutant.apply((CSRC / case.file).read_text()))
    library = compiled(target, folder / "csrc", folder)
    if library is None:
        return NO_CPP
    return SAME if library.read_bytes() == baseline else _test(target, library, kills)


def _test(target: Target, library: Path, kills: Counter[str]) -> int:
    target.use(library)
    options = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain"]
    options += ["--hypothesis-profile=mutants", "--timeout=0"]
    options += [f"--basetemp={library.parent / 'pytest'}"]
    return int(pytest.main([*target.tests, *options], [_KillersFirst(kills, library.parent / KILLER)]))


class _KillersFirst:
    """Runs the tests in the order of how often they failed before, and returns which does."""

    def __init__(self, kills: Counter[str], killer: Path) -> None:
        self._kills, self._killer = kills, killer

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: -self._kills[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._killer.write_text(report.nodeid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
