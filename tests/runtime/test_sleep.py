"""A runtime that sleeps: its memory is given back, requests wait, and the tokens after it are the same."""

import asyncio
import gc
import os
import threading
from pathlib import Path

import pytest
import torch

from lamina import (
    AsyncRuntime,
    ClosedError,
    CompileConfig,
    LoadError,
    NGram,
    RequestError,
    Runtime,
    SamplingParams,
)

from ..resident_pages import resident_of
from .asking import SMALL, iterate, tokens_of, until

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6, 7], list(range(40, 70)), [7] * 33]
WAYS = [
    {},
    {"speculative": NGram(k=2)},
    {"quantization": "int8"},
    {"num_kv_blocks": 12, "block_size": 4, "max_num_seqs": 2},
]


def tokens(runtime, prompts=PROMPTS, params=GREEDY):
    return [output.outputs[0].token_ids for output in runtime.generate(prompts, params)]


def slept_on(runtime, level):
    runtime.sleep(level)
    assert runtime.is_sleeping
    runtime.wake()
    assert not runtime.is_sleeping


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("settings", WAYS, ids=lambda settings: next(iter(settings), "plain"))
def test_tokens_are_the_same_before_and_after(open_runtime, settings, level):
    runtime = open_runtime(**settings)
    for params in (GREEDY, SAMPLED):
        before = tokens(runtime, params=params)
        slept_on(runtime, level)
        assert tokens(runtime, params=params) == before


@pytest.mark.parametrize("graphs", ["on", "auto", "lazy"])
def test_captures_are_dropped_and_made_again(tiny_folder, compile_cache, graphs):
    config = CompileConfig(cuda_graphs=graphs)
    with Runtime.from_pretrained(
        tiny_folder, compile=config, cache_dir=compile_cache, dtype="float32", device="cpu", max_num_seqs=4
    ) as runtime:
        before, captured = tokens(runtime), runtime.stats()["cuda_graphs"]["sizes"]
        runtime.sleep()
        assert not runtime.stats()["cuda_graphs"]["sizes"]
        assert not runtime.idle(), "nothing is captured while it sleeps"
        runtime.wake()
        assert runtime.stats()["cuda_graphs"]["sizes"] == captured
        for _ in range(3):
            assert tokens(runtime) == before
        assert runtime.stats()["compile"]["recompiles"] == 0


def test_weights_made_up_are_made_up_again(tiny_folder):
    settings = {"load_format": "dummy", "seed": 5, "device": "cpu", "compile": False}
    with Runtime.from_pretrained(tiny_folder, **settings) as runtime:
        before = tokens(runtime)
        slept_on(runtime, 2)
        assert tokens(runtime) == before


def test_the_prefix_cache_is_empty_after_it(open_runtime):
    runtime, prompt = open_runtime(block_size=4), [*range(30)]
    tokens(runtime, [prompt])
    assert runtime.generate([prompt], GREEDY)[0].num_cached_tokens > 0
    slept_on(runtime, 1)
    assert runtime.stats()["blocks"]["cached"] == 0
    assert runtime.generate([prompt], GREEDY)[0].num_cached_tokens == 0


def resident_bytes():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def open_files():
    """The numbers of the files that this process has open, and what each is."""
    with os.scandir("/proc/self/fd") as entries:
        found = [(each.name, _target_of(each.path)) for each in entries]
    return {each for each in found if each[1] is not None}


def _target_of(link):
    try:
        target = os.readlink(link)
    except FileNotFoundError:  # closed meanwhile
        return None
    return None if target == f"/proc/{os.getpid()}/fd" else target  # by which this is read


@pytest.mark.parametrize(("level", "what"), [(1, "cache"), (2, "both")])
def test_the_process_gives_the_memory_back(make_tiny_folder, level, what):
    """On a CPU level 1 keeps the weights where they are, and level 2 gives them back as well."""
    folder = make_tiny_folder(hidden_size=512, intermediate_size=4096, num_hidden_layers=4)
    settings = {"device": "cpu", "compile": False, "num_kv_blocks": 1024, "dtype": "float32"}
    with Runtime.from_pretrained(folder, **settings) as runtime:
        runner = runtime._loaded.runner
        for keys, values in runner._memory._caches:
            keys.fill_(1.0), values.fill_(1.0)  # so that the system has given it
        weights, total = runner._memory.weights[0].num_bytes, runner._memory.num_bytes
        assert weights > 64 << 20
        assert total - weights >= 8 << 20
        dropped = [runner._memory._cache] + [runner._memory.weights[0]._memory] * (what == "both")
        ranges = [(view.data_ptr(), view.nbytes) for memory in dropped for view in memory.views()]
        num_bytes = total if what == "both" else total - weights
        assert sum(size for _, size in ranges) == num_bytes <= resident_of(ranges)
        runtime.sleep(level)
        assert resident_of(ranges) <= 0.05 * num_bytes
        runtime.wake()
        tokens(runtime)


def test_fifty_cycles_leave_nothing(make_tiny_folder):
    folder = make_tiny_folder(hidden_size=256, intermediate_size=1024)
    settings = {"device": "cpu", "compile": False, "num_kv_blocks": 512, "dtype": "float32"}
    with Runtime.from_pretrained(folder, **settings) as runtime:
        before = tokens(runtime)
        for _ in range(3):
            slept_on(runtime, 2)
        resident_bytes()  # collects what other tests have left open
        threads, files = {*threading.enumerate()}, open_files()
        resident = resident_bytes()
        for cycle in range(50):
            slept_on(runtime, 1 + cycle % 2)
        assert {*threading.enumerate()} <= threads
        assert open_files() <= files
        assert resident_bytes() - resident < 8 << 20, "less than the weights of one cycle"
        assert tokens(runtime) == before


def test_a_stream_goes_on_after_it(open_runtime):
    runtime = open_runtime()
    whole = runtime.generate([PROMPTS[0]], GREEDY)[0].outputs[0].token_ids
    for level in (1, 2):
        stream, read = runtime.stream(PROMPTS[0], GREEDY), []
        read.append(next(stream))
        slept_on(runtime, level)
        read += [*stream]
        assert tokens_of(read) == whole


def test_whoever_put_it_to_sleep_is_told_so_when_he_asks(open_runtime, is_idle):
    runtime = open_runtime()
    right = tokens(runtime)
    runtime.sleep()
    with pytest.raises(RequestError, match=r"sleeps.*call wake\(\) first"):
        runtime.generate([1], GREEDY)
    with pytest.raises(RequestError, match=r"call wake\(\) first"):
        next(runtime.stream([1], GREEDY))
    assert runtime.stats()["requests"]["waiting"] == 0
    runtime.wake()
    assert tokens(runtime) == right
    is_idle(runtime)


def test_other_threads_wait_until_it_is_woken(open_runtime):
    runtime, answers = open_runtime(), []
    right = tokens(runtime)
    runtime.sleep(2)
    asking = [threading.Thread(target=lambda: answers.append(tokens(runtime))) for _ in range(3)]
    for thread in asking:
        thread.start()
    while runtime.stats()["requests"]["waiting"] < 9:
        assert all(thread.is_alive() for thread in asking)
    runtime.sleep(2)  # once more changes nothing
    runtime.wake()
    for thread in asking:
        thread.join()
    assert answers == [right] * 3


def test_a_deadline_passes_while_it_sleeps(open_runtime):
    runtime, answers = open_runtime(), []
    runtime.sleep()
    asking = threading.Thread(
        target=lambda: answers.extend(runtime.generate([5], GREEDY, timeout=0.2)), daemon=True
    )
    asking.start()
    asking.join(60)
    assert answers[0].outputs[0].stop_reason == "deadline"
    assert runtime.is_sleeping


def test_it_is_closed_while_it_sleeps(tiny_folder):
    runtime = Runtime.from_pretrained(tiny_folder, **SMALL)
    raised = []

    def ask():
        try:
            runtime.generate([5], GREEDY)
        except ClosedError as error:
            raised.append(error)

    runtime.sleep(2)
    asking = threading.Thread(target=ask)
    asking.start()
    while not runtime.stats()["requests"]["waiting"]:
        pass
    runtime.close()
    asking.join(60)
    for call in (runtime.sleep, runtime.wake, lambda: runtime.is_sleeping):
        with pytest.raises(ClosedError):
            call()
    assert not asking.is_alive()


@pytest.mark.parametrize("level", [0, 3, -1, True, 1.0, "1", None, [1]])
def test_a_level_that_there_is_not_is_refused(open_runtime, level):
    runtime = open_runtime()
    with pytest.raises(RequestError, match=r"level is .*; wanted 1"):
        runtime.sleep(level)
    assert not runtime.is_sleeping
    tokens(runtime)


def test_to_wake_what_is_awake_does_nothing(open_runtime):
    runtime = open_runtime(block_size=4)
    tokens(runtime, [[*range(30)]])
    runtime.wake()
    assert runtime.generate([[*range(30)]], GREEDY)[0].num_cached_tokens > 0


def test_it_sleeps_more_deeply_and_never_less(open_runtime):
    runtime = open_runtime()
    right = tokens(runtime)
    weights = runtime._loaded.runner._memory.weights[0]
    for level, place in ((1, "device"), (2, "nowhere"), (1, "nowhere")):
        runtime.sleep(level)
        assert weights.place == place
    runtime.wake()
    assert tokens(runtime) == right


def test_weights_that_cannot_be_read_leave_it_asleep(tiny_folder, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tiny_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    with Runtime.from_pretrained(folder, **SMALL) as runtime:
        right = tokens(runtime)
        runtime.sleep(2)
        held = folder / "model.safetensors"
        held.rename(tmp_path / "elsewhere")
        for _ in range(2):
            with pytest.raises(LoadError):
                runtime.wake()
            assert runtime.is_sleeping
        (tmp_path / "elsewhere").rename(held)
        runtime.wake()
        assert tokens(runtime) == right


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_an_async_runtime_sleeps_between_two_steps(tiny_folder, engine):
    async def program():
        settings = SMALL | {"max_num_seqs": 2}
        async with await AsyncRuntime.from_pretrained(tiny_folder, engine=engine, **settings) as runtime:
            right = [(await runtime.generate(p, LONG).output()).outputs[0].token_ids for p in PROMPTS]
            asked = [runtime.generate(prompt, LONG) for prompt in PROMPTS]
            read = [await iterate(asked[0], 2)]
            for level in (1, 2):
                await runtime.sleep(level)
                assert await runtime.is_sleeping()
            await until(lambda: _is_asleep(runtime))
            assert runtime.health().ok
            queued = runtime.generate(PROMPTS[0], LONG)
            late = runtime.generate(PROMPTS[0], LONG, timeout=0.2)
            assert (await late.output()).outputs[0].stop_reason == "deadline"
            dropped = runtime.generate(PROMPTS[0], LONG, request_id="dropped")
            assert await runtime.abort("dropped")
            assert (await dropped.output()).outputs[0].finish_reason == "abort"
            assert not queued.is_over
            await runtime.wake()
            outputs = [await one.output() for one in (*asked, queued)]
            assert [output.outputs[0].token_ids for output in outputs] == [*right, right[0]]
            assert tokens_of(read[0] + await iterate(asked[0])) == right[0]
            with pytest.raises(RequestError, match="level is 5"):
                await runtime.sleep(5)

    asyncio.run(program())


async def _is_asleep(runtime):
    return runtime.health().status.is_asleep


def test_an_error_of_a_step_in_flight_ends_its_request_alone(open_runtime):
    """The step that sleep() waits for may have failed."""
    runtime = open_runtime()
    right = tokens(runtime)
    core, fail = runtime._loaded.core, [True]
    core.depth = 2
    streams = [runtime.stream(prompt, GREEDY) for prompt in PROMPTS]
    read = [[next(stream)] for stream in streams]
    handle = core._pending[-1][1] if core._pending else None
    if handle is not None:
        result = handle._step.read
        handle._step.read = lambda: (_ for _ in ()).throw(ValueError("broken")) if fail.pop() else result()
    slept_on(runtime, 1)
    for so_far, stream in zip(read, streams, strict=True):
        so_far += [*stream]
    assert [tokens_of(deltas) for deltas in read] == right


def test_gradients_and_inference_of_the_caller_change_nothing(open_runtime):
    runtime = open_runtime()
    right = tokens(runtime)
    with torch.inference_mode():
        slept_on(runtime, 2)
    with torch.enable_grad():
        slept_on(runtime, 1)
    assert tokens(runtime) == right
