"""A worker killed, or Ctrl-C, at any moment: requests end, nothing is left, and the next start works."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from lamina import EngineDeadError, Runtime, SamplingParams
from lamina.runtime import child_process

from ..asking import SMALL
from ..engine.processes import children, wait_until
from .moments import moments

PROMPTS = ["Once upon a time", "The capital", "one two three one two three", "x"]
FEW = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
MANY = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
MARK = "LAMINA_TEST_MARK"  # in the environment of every process that a scene starts, and of those they start
START = "from lamina.runtime.MODULE import main; main()"
PROGRAM = """
import json, signal, sys, lamina
from lamina.runtime import child_process
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell starts in the background
settings = json.loads(sys.argv[2])
child_process.BOOT = sys.argv[3]
with lamina.Runtime.from_pretrained(sys.argv[1], **settings) as runtime:
    many = 400 if sys.argv[4] in ("prefilling", "decoding") else 4
    runtime.generate("x", lamina.SamplingParams(max_tokens=many, ignore_eos=True))
    if sys.argv[4] == "idle":
        signal.raise_signal(signal.SIGINT)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """A moment, with all that its processes are given."""

    moment: object
    folder: Path
    settings: dict
    boot: str  # of workers
    witness: Path  # when it came
    mark: str

    def play(self):
        """When whatever was asked had ended."""
        ended = self.play_interrupt() if self.moment.action == "interrupt" else self.play_kill()
        return ended - float(self.witness.read_text())

    def play_kill(self):
        outcomes = []
        try:
            runtime = Runtime.from_pretrained(self.folder, **self.settings)
        except EngineDeadError as error:
            outcomes.append((time.monotonic(), str(error)))
        else:
            outcomes = self.use(runtime)
            runtime.close()
            assert self.moment.stage == "ending" or outcomes
        assert all(f"rank {self.moment.rank}: its process" in words for _, words in outcomes), outcomes
        assert all("was ended by SIGKILL" in words for _, words in outcomes), outcomes
        return max((when for when, _ in outcomes), default=time.monotonic())

    def use(self, runtime):
        """The errors that requests end with, and when, around the moment."""
        outcomes, stage = [], self.moment.stage

        def ask(prompt):
            try:
                for _ in runtime.stream(prompt, MANY):
                    pass
            except EngineDeadError as error:
                outcomes.append((time.monotonic(), str(error)))

        if stage in ("prefilling", "decoding"):
            threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(outcomes) == len(PROMPTS)
            return outcomes
        assert [len(one.outputs[0].token_ids) for one in runtime.generate(PROMPTS, FEW)] == [4] * 4
        if stage == "idle":
            self.witness.write_text(str(time.monotonic()))
            os.kill(runtime._loaded.executor.pids[self.moment.rank], signal.SIGKILL)
            ask("x")
            assert len(outcomes) == 1
        return outcomes

    def play_interrupt(self):
        arguments = [str(self.folder), json.dumps(self.settings), self.boot, self.moment.stage]
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments], stderr=subprocess.PIPE, text=True
        ) as process:
            if self.moment.stage == "idle":
                self.witness.write_text(str(time.monotonic()))
            _, said = process.communicate(timeout=240)
        assert process.returncode == -signal.SIGINT, said
        assert "KeyboardInterrupt" in said
        return time.monotonic()

    def processes(self):
        """Those that descend from the scene's, whoever their parents are now."""
        found, wanted = set(), f"{MARK}={self.mark}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # it has ended
                continue
            if wanted in environment:
                found.add(int(folder.name))
        return found


@pytest.fixture
def stage(tiny_text_folder, tmp_path, monkeypatch):
    """stage(moment, cache, starts=True) plays it, and checks what is left and that the next start works."""
    boot, before, played = child_process.BOOT, children(), []
    assert START in boot

    def play(moment, cache, *, starts=True):
        own = tmp_path / str(len(played))
        temporary, witness = own / "temporary", own / "witness"
        temporary.mkdir(parents=True)
        cache = own / "cache" if moment.is_cold else cache
        parallel = {"tensor_parallel": moment.ranks, "executor": "multiproc", "dtype": "float32"}
        settings = {**SMALL, **parallel, "compile": cache is not None}
        settings |= {} if cache is None else {"cache_dir": str(cache)}
        own_boot = boot.replace(START, moment.prelude(witness) + START)
        scene = Scene(
            moment=moment,
            folder=tiny_text_folder,
            settings=settings,
            boot=own_boot,
            witness=witness,
            mark=f"{os.getpid()}-{len(played)}",
        )
        shared = set(os.listdir("/dev/shm"))
        monkeypatch.setenv(MARK, scene.mark)
        monkeypatch.setenv("TMPDIR", str(temporary))
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        monkeypatch.setattr(child_process, "BOOT", own_boot)
        seconds = scene.play()
        wait_until(lambda: not scene.processes() and children() <= before)
        assert not list(temporary.iterdir())
        wait_until(lambda: set(os.listdir("/dev/shm")) <= shared)
        played.append(moment)
        print(f"{seconds:.2f} s after {moment}")  # shown by -s
        monkeypatch.setattr(child_process, "BOOT", boot)
        if not starts:
            return
        with Runtime.from_pretrained(tiny_text_folder, **settings) as runtime:
            assert len(runtime.generate("x", FEW)[0].outputs[0].token_ids) == 4
        if cache is not None:
            assert not list((cache / "temporary").iterdir())
            assert not list(cache.rglob("*.part"))

    return play


@pytest.mark.long
def test_a_worker_killed_at_any_moment_leaves_nothing(stage):
    some = [moment for moment in moments(0, 7) if moment.stage not in ("compiling", "warming up")]
    for moment in some:
        stage(moment, None, starts=moment is some[-1])  # each but the first shows that one works


@pytest.mark.long
def test_a_start_that_is_interrupted_leaves_nothing(stage):
    (moment,) = moments(2, 1, "interrupt")
    stage(moment, None, starts=False)


@pytest.fixture
def warm(tiny_text_folder, compile_cache):
    """A cache in which every plan of the scenes is."""
    for ranks in (1, 2):
        settings = {"tensor_parallel": ranks, "executor": "multiproc", "dtype": "float32"}
        with Runtime.from_pretrained(
            tiny_text_folder, **{**SMALL, **settings, "compile": True, "cache_dir": compile_cache}
        ) as runtime:
            runtime.generate("x", FEW)
    return compile_cache


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [1])
def test_workers_killed_at_fifty_moments_leave_nothing(stage, warm, seed):
    for moment in moments(seed, 50):
        stage(moment, warm)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1])
def test_interrupts_at_fourteen_moments_leave_nothing(stage, warm, seed):
    for moment in moments(seed, 14, "interrupt"):
        stage(moment, warm)
