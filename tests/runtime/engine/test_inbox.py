"""A core that is faster than its outputs are taken in leaves the event loop to others, too."""

import asyncio
import dataclasses
import itertools
import time

from lamina import AsyncRuntime, SamplingParams
from lamina.runtime.engine import inbox
from lamina.runtime.engine.async_client import NUM_AT_ONCE
from lamina.runtime.engine.inbox import TURN
from lamina.runtime.engine.output_processor import OutputProcessor


class Slow:
    """A listener that takes longer for a step than the core, and notes how often others came to run."""

    def __init__(self):
        self.num_turns = 0
        self.seen = []

    def outputs(self, outputs, now):
        self.seen.append(self.num_turns)
        time.sleep(2 * TURN)

    def finished(self, request):
        pass


def test_others_run_between_any_two_steps_outputs(tiny_folder):
    async def run():
        async with await AsyncRuntime.from_pretrained(tiny_folder, compile=False) as runtime:
            slow = Slow()
            runtime.listen(slow)
            done = asyncio.ensure_future(runtime.generate([5], PARAMS).output())
            while not done.done():
                await asyncio.sleep(0)
                slow.num_turns += 1
            assert len(done.result().outputs[0].token_ids) == 60
            return slow.seen

    seen = asyncio.run(run())
    assert len(seen) >= 60
    assert all(before < after for before, after in itertools.pairwise(seen))


def test_others_run_within_a_step_of_many_outputs(tiny_text_folder, monkeypatch):
    monkeypatch.setattr(inbox, "TURN", 0.0)
    num_turns, taken, process = 0, [], OutputProcessor.process

    def noted(self, outputs):
        taken.append((num_turns, len(outputs)))
        return process(self, outputs)

    async def run():
        nonlocal num_turns
        async with await AsyncRuntime.from_pretrained(tiny_text_folder, **MANY) as runtime:
            params = dataclasses.replace(PARAMS, n=150, max_tokens=4)
            alone = await runtime.generate("hello", params).output()
            monkeypatch.setattr(OutputProcessor, "process", noted)
            done = asyncio.ensure_future(runtime.generate("hello", params).output())
            while not done.done():
                await asyncio.sleep(0)
                num_turns += 1
            assert done.result().outputs == alone.outputs

    asyncio.run(run())
    turns, lengths = zip(*taken, strict=True)
    assert max(lengths) == NUM_AT_ONCE
    assert sum(lengths) >= 150 * 4
    assert all(before < after for before, after in itertools.pairwise(turns))


MANY = {"compile": False, "device": "cpu", "num_kv_blocks": 400, "max_num_seqs": 150}
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)
