"""A core that is faster than its outputs are taken in leaves the event loop to others, too."""

import asyncio
import itertools
import time

from lamina import AsyncRuntime, SamplingParams
from lamina.runtime.engine.inbox import TURN


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


PARAMS = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)
