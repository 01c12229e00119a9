"""What tests of asyncio ask with and wait for."""

import asyncio
import gc
import threading

import pytest

from lamina import SamplingParams, StreamDelta

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SMALL = {"compile": False, "device": "cpu", "num_kv_blocks": 96, "max_num_seqs": 6}


def text_of(deltas):
    return "".join(delta.text for delta in deltas)


def tokens_of(deltas):
    return tuple(token for delta in deltas for token in delta.token_ids)


def as_deltas(answer):
    """A whole answer as one that is read in a single piece."""
    return [
        StreamDelta(
            request_id="",
            index=answer.index,
            text=answer.text,
            token_ids=answer.token_ids,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            logprobs=answer.logprobs,
        )
    ]


def assert_near(found, right):
    """Log-probabilities of the same tokens in the same order; their last bits depend on the batch."""
    found, right = [*(found or ())], [*(right or ())]
    assert len(found) == len(right)
    for one, other in zip(found, right, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert one.keys() == other.keys() or len(one) == len(other)
        shared = one.keys() & other.keys()
        assert [one[i].logprob for i in shared] == pytest.approx([other[i].logprob for i in shared], abs=1e-3)


async def until(holds, seconds=60.0):
    """Waits, a step at a time, for what must come true."""
    for _ in range(int(seconds * 200)):
        if await holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came true")


async def assert_ended(runtime):
    """Nobody holds a block, a row or an entry of any book."""

    async def is_idle():
        stats = await runtime.stats()
        return stats["blocks"]["used"] == stats["requests"]["running"] == stats["requests"]["waiting"] == 0

    gc.collect()
    await until(is_idle)
    client = runtime._client
    await until(lambda: true_of(not client._live and not client._asked))
    assert not client._calls
    assert not client._notified
    assert not client._processor._answers


async def assert_idle(runtime):
    """All requests have ended, and no task is left but the test's own."""
    await assert_ended(runtime)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def true_of(value):
    return value


async def iterate(generation, most=None):
    deltas = []
    async for delta in generation:
        deltas.append(delta)
        if len(deltas) == most:
            break
    return deltas


async def read_slowly(generation, pauses):
    deltas = []
    while new := await generation.read():
        deltas += new
        for _ in range(pauses.randrange(12)):
            await asyncio.sleep(0)
        await asyncio.sleep(pauses.choice([0, 0, 0.002]))
    return deltas


def core_threads():
    """Threads of engines, those of runtimes that other tests hold among them."""
    return {each for each in threading.enumerate() if each.name == "lamina-core"}
