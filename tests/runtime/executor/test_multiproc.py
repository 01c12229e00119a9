"""Workers in processes of their own: one process's tokens, errors as values, and nothing left of any."""

import asyncio
import contextlib
import gc
import getpass
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from lamina import AsyncRuntime, EngineDeadError, LoadError, Runtime, SamplingParams, UnsupportedError
from lamina.common.errors import ConfigError, EngineError
from lamina.runtime import child_process
from lamina.runtime.executor import worker_answers, worker_processes
from lamina.runtime.startup import over_processes
from lamina.runtime.structured_outputs import StructuredOutputs

from ..asking import SHORT, SMALL
from ..engine.processes import children, is_running, parent_of, wait_until

PROMPTS = ["Once upon a time", "The capital", "one two three one two three", "x"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=16, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1, seed=3, max_tokens=12, presence_penalty=0.5, logit_bias={5: 3.0}),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=20, bad_words=["a"], min_tokens=4),
    SamplingParams(temperature=0, max_tokens=12, structured_outputs=StructuredOutputs(regex="[a-c]{8}")),
]
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
# What a worker runs before its own program: a step fails on some rank, or is slow there.
FAULT = """
import sys, time
from lamina.runtime.worker import model_runner
execute, rank, steps = model_runner.ModelRunner.execute, int(sys.argv[2]), [0]
def faulty(self, plan):
    steps[0] += 1
    FAULT
    return execute(self, plan)
model_runner.ModelRunner.execute = faulty
"""


@pytest.fixture(autouse=True)
def own_temp(tmp_path, monkeypatch):
    """Nothing is left: no child, no file in the folder of temporary files, no file in shared memory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, shared = children(), set(os.listdir("/dev/shm"))
    yield
    wait_until(lambda: children() <= before)  # one that has ended may still have to be waited for
    wait_until(lambda: not os.listdir(tmp_path))
    wait_until(lambda: (new := set(os.listdir("/dev/shm")) - shared) <= (new and in_use_elsewhere()))


def in_use_elsewhere():
    """The files in shared memory that processes have open that are neither this one nor its children."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) != os.getpid() and parent_of(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                maps = (process / "maps").read_text()
                found.update(re.findall(r"/dev/shm/([^/\s]+)", maps))
                files = [os.readlink(each) for each in (process / "fd").iterdir()]
                found.update(re.findall(r"/dev/shm/([^/\s]+)", "\n".join(files)))
    return found


@pytest.fixture(scope="module")
def shared(tiny_text_folder):
    with Runtime.from_pretrained(tiny_text_folder, executor="multiproc", **SMALL) as runtime:
        yield runtime


def open_runtime(folder, **settings):
    return Runtime.from_pretrained(folder, **{"executor": "multiproc", **SMALL, **settings})


def with_fault(monkeypatch, fault):
    """Workers that are started from now on have it."""
    boot, program = child_process.BOOT, "from lamina.runtime.MODULE import main; main()"
    assert program in boot
    prelude = f"exec({FAULT.replace('FAULT', fault)!r}); "
    monkeypatch.setattr(child_process, "BOOT", boot.replace(program, prelude + program))


def pids_of(runtime):
    return runtime._loaded.executor.pids


def answers_of(runtime):
    return [
        (one.outputs[0].token_ids, one.outputs[0].finish_reason, one.outputs[0].logprobs, one.prompt_logprobs)
        for one in runtime.generate(PROMPTS, PARAMS)
    ]


def test_answers_are_those_of_one_process_and_so_are_the_names_of_figures(shared, tiny_text_folder):
    with open_runtime(tiny_text_folder, executor="uniproc") as alone:
        assert answers_of(shared) == answers_of(alone)
        theirs, ours = shared.stats(), alone.stats()
        assert shared.explain() == alone.explain()
    assert theirs.keys() == ours.keys()
    for name in ("blocks", "requests", "resolved", "quantization", "compile", "cuda_graphs"):
        assert theirs[name] == ours[name]
    assert len(pids_of(shared)) == 1
    assert pids_of(shared)[0] != os.getpid()


def test_code_of_a_request_is_refused_by_name_and_other_requests_go_on(shared):
    stream = shared.stream("Once", LONG)
    next(stream)
    with pytest.raises(UnsupportedError, match=r"logits_processors .* executor='uniproc'"):
        shared.generate("x", SamplingParams(max_tokens=2, logits_processors=[lambda *given: given[-1]]))
    assert next(stream).token_ids
    stream.close()
    assert shared.stats()["blocks"]["used"] == 0


def test_what_cannot_be_loaded_is_the_same_error_here(tiny_text_folder, monkeypatch):
    with pytest.raises(ConfigError, match=r"cannot be sent .* executor='uniproc'"):
        open_runtime(tiny_text_folder, tokenizer=lambda: None)
    with_fault(monkeypatch, "0")
    boot = child_process.BOOT
    worse = "from lamina.runtime.startup import builder; builder.build_worker = None; from lamina"
    monkeypatch.setattr(child_process, "BOOT", boot.replace("from lamina", worse, 1))
    with pytest.raises(EngineError, match="'NoneType' object is not callable"):
        open_runtime(tiny_text_folder)
    monkeypatch.setattr(child_process, "BOOT", "raise SystemExit(7)")
    with pytest.raises(EngineDeadError, match=r"rank 0: its process \d+ ended with exit status 7"):
        open_runtime(tiny_text_folder)


def test_a_step_that_fails_is_tried_again_and_the_rank_says_where(tiny_text_folder, shared, monkeypatch):
    with_fault(monkeypatch, "if steps[0] in (3, 4): raise ValueError(f'step {steps[0]} is broken')")
    with open_runtime(tiny_text_folder) as runtime:
        assert answers_of(runtime) == answers_of(shared)
        with pytest.raises(UnsupportedError, match="no_such") as caught:
            runtime._loaded.executor.collective_rpc("no_such")
        assert "on rank 0:\nTraceback" in "".join(caught.value.__notes__)


def test_a_killed_worker_ends_every_request_and_the_next_start_works(tiny_text_folder, shared):
    with open_runtime(tiny_text_folder) as runtime:
        assert_dies(runtime, after=20)
        with pytest.raises(EngineDeadError, match="SIGKILL"):  # at once, for who comes later
            runtime.generate("x", SamplingParams(max_tokens=2))
    with open_runtime(tiny_text_folder) as runtime:
        assert answers_of(runtime) == answers_of(shared)


def test_a_worker_that_cannot_go_on_says_why(tiny_text_folder, monkeypatch):
    with_fault(monkeypatch, "if steps[0] == 3: raise SystemExit('it has no more to give')")
    said = pytest.raises(EngineDeadError, match=r"exit status 1: .*no more to give")
    with open_runtime(tiny_text_folder) as runtime, said:
        answers_of(runtime)


def assert_dies(runtime, *, after, rank=0):
    """Every request ends by a worker's end after so many steps, with an error that says which it was."""
    pids, ended = pids_of(runtime), []
    executor, count = runtime._loaded.executor, itertools.count()
    execute = executor.execute

    def killing(plan):
        if next(count) == after:
            os.kill(pids[rank], signal.SIGKILL)
        return execute(plan)

    def ask(prompt):
        try:
            for _ in runtime.stream(prompt, LONG):
                pass
        except EngineDeadError as error:
            ended.append(str(error))

    executor.execute = killing
    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(ended) == len(PROMPTS)
    for words in ended:
        assert f"rank {rank}: its process {pids[rank]} was ended by SIGKILL" in words
    assert not any(map(is_running, pids))
    assert runtime._loaded.core.stats()["requests"]["running"] == 0


def test_a_rank_that_fails_alone_ends_all_with_its_traceback(tiny_text_folder, monkeypatch):
    monkeypatch.setattr(worker_answers, "SECONDS_TO_AGREE", 0.2)
    fault = "if rank == 1 and steps[0] == 4: raise ValueError('only here')"
    with_fault(monkeypatch, fault)
    with open_runtime(tiny_text_folder, tensor_parallel=2) as runtime:
        pids = pids_of(runtime)
        assert len(set(pids)) == 2
        with pytest.raises(EngineDeadError, match=r"failed on rank 1 and not on all .*only here") as caught:
            runtime.generate(PROMPTS, LONG)
        assert "in faulty" in str(caught.value)
        assert not any(map(is_running, pids))


def test_two_ranks_give_the_tokens_of_one_however_slow_one_of_them_is(tiny_text_folder, monkeypatch):
    with open_runtime(tiny_text_folder, executor="uniproc", dtype="float64") as alone:
        wanted = [tokens for tokens, *_ in answers_of(alone)]
    with_fault(monkeypatch, "time.sleep(0.02 * rank)")
    with open_runtime(tiny_text_folder, executor="auto", tensor_parallel=2, dtype="float64") as runtime:
        assert [tokens for tokens, *_ in answers_of(runtime)] == wanted
        assert runtime._loaded.executor.collective_rpc("note_use") == [None, None]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_stages_give_the_tokens_of_one_process_until_one_of_them_is_killed(tiny_text_folder, rank):
    with open_runtime(tiny_text_folder, executor="uniproc", dtype="float64") as alone:
        wanted = [tokens for tokens, *_ in answers_of(alone)]
    with open_runtime(tiny_text_folder, pipeline_parallel=2, dtype="float64") as runtime:
        assert len(set(pids_of(runtime))) == 2
        assert [tokens for tokens, *_ in answers_of(runtime)] == wanted
        assert_dies(runtime, after=20, rank=rank)


def test_a_worker_that_is_stopped_counts_as_lost(tiny_text_folder, monkeypatch):
    with open_runtime(tiny_text_folder) as runtime:
        monkeypatch.setattr(worker_processes, "SECONDS_SILENT", 2.0)
        os.kill(pids_of(runtime)[0], signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="has said nothing for 2 s: it is stopped, or hangs"):
            runtime.generate("x", LONG)


PROGRAM = """
import signal, sys, lamina
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell starts in the background
runtime = lamina.Runtime.from_pretrained(sys.argv[1], executor="multiproc", **{settings!r})
print(*runtime._loaded.executor.pids, flush=True)
while True:  # until the test ends it
    runtime.generate("x", lamina.SamplingParams(max_tokens=100000, ignore_eos=True))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_process_that_started_them(tiny_text_folder, number, tmp_path):
    program = PROGRAM.replace("{settings!r}", repr({**SMALL, "num_kv_blocks": 4096}))
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tiny_text_folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        (pid,) = map(int, process.stdout.readline().split())
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    wait_until(lambda: not is_running(pid))
    assert ("KeyboardInterrupt" in said) == (number == signal.SIGINT)


def test_a_runtime_that_is_dropped_ends_its_workers(tiny_text_folder):
    runtime = open_runtime(tiny_text_folder)
    (pid,) = pids_of(runtime)
    assert is_running(pid)
    del runtime
    gc.collect()
    wait_until(lambda: not is_running(pid))


def test_a_missing_folder_starts_no_process(tmp_path):
    with pytest.raises(LoadError):
        open_runtime(tmp_path / "nothing")


def test_a_core_in_a_process_of_its_own_has_workers_and_is_lost_with_them(tiny_text_folder, shared):
    async def body():
        runtime = await AsyncRuntime.from_pretrained(
            tiny_text_folder, engine="process", **{**SMALL, "executor": "multiproc"}
        )
        async with runtime:
            (wanted,) = shared.generate(PROMPTS[0], SHORT)
            answer = await runtime.generate(PROMPTS[0], SHORT).output()
            assert answer.outputs[0].token_ids == wanted.outputs[0].token_ids
            core = runtime._client._handle.pid
            (worker,) = (int(pid) for pid in os.listdir("/proc") if pid.isdigit() and parent_of(pid) == core)
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await runtime.generate(PROMPTS[0], LONG).output()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"record": "/nowhere/log"}, "record is '/nowhere/log', which cannot be written: /nowhere is no"),
        ({"record": "/tmp"}, "record is '/tmp', which cannot be written: it is a folder"),
        ({"record": "~nobody-of-this-name/log"}, "record is '~nobody-of-this-name/log', which cannot be"),
        ({"swap_bytes": 2**62}, f"swap_bytes is {2**62}; wanted at most"),
    ],
    ids=str,
)
def test_what_this_process_can_refuse_starts_no_worker(tiny_folder, monkeypatch, settings, named):
    started = []
    monkeypatch.setattr(over_processes, "WorkerProcesses", lambda *given, **named: started.append(given))
    with pytest.raises(ConfigError, match=re.escape(named)):
        Runtime.from_pretrained(tiny_folder, **SMALL | {"executor": "multiproc"} | settings)
    assert not started


def test_sharing_out_layers_leaves_no_folder_of_torch(tiny_folder, tmp_path):
    """In a new process: torch imports Dynamo, which makes a folder, for the first ops on meta tensors."""
    program = (
        "import sys; from lamina.runtime.config import RuntimeConfig;"
        "from lamina.runtime.startup.loader import resolve_runtime;"
        "from lamina.common.progress import say_nothing;"
        "config = RuntimeConfig(model=sys.argv[1], device='cpu', compile=False, pipeline_parallel=2);"
        "assert len(resolve_runtime(config, say_nothing).stages) == 2"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    command = [sys.executable, "-c", program, str(tiny_folder)]
    subprocess.run(command, env=environment | {"TMPDIR": str(tmp_path)}, check=True)
    try:
        assert not [path.name for path in tmp_path.iterdir()]
    finally:
        shutil.rmtree(tmp_path / f"torchinductor_{getpass.getuser()}", ignore_errors=True)
