"""Requests, sleep, waking and updates in any order: every answer is what its weights give it alone."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from safetensors.torch import load_file

from lamina import LoadError, RequestError, Runtime, SamplingParams

from .asking import SMALL, tokens_of

PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=7, max_tokens=6, ignore_eos=True),
]
PROMPTS = [[5, 6, 7], [*range(40, 70)], [7] * 17, [300]]
WAYS = [{"num_kv_blocks": 14, "block_size": 4, "max_num_seqs": 3}, {"quantization": "int8"}]


class Machine(RuleBasedStateMachine):
    """A runtime of one of two checkpoints; `right` are the answers of each alone."""

    folders, given, right, way = (), (), (), {}

    @initialize()
    def open(self):
        self.runtime = Runtime.from_pretrained(self.folders[0], **SMALL | self.way)
        self.weights, self.level, self.are_there, self.is_given = 0, 0, True, False
        self.live = {}
        self.number = 0

    @rule(prompt=st.integers(0, 3), params=st.integers(0, 1), at_once=st.integers(0, 3))
    def ask(self, prompt, params, at_once):
        self.number += 1
        stream = self.runtime.stream(PROMPTS[prompt], PARAMS[params])
        self.live[self.number] = ((prompt, params), stream, [])
        self.read(self.number, at_once)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 12))
    def read_on(self, data, count):
        self.read(data.draw(st.sampled_from(sorted(self.live))), count)

    def read(self, number, count):
        asked, stream, so_far = self.live[number]
        for _ in range(count):
            try:
                so_far.append(next(stream))
            except StopIteration:
                assert tokens_of(so_far) == self.right[self.weights][asked]
                del self.live[number]
                return
            except RequestError:
                assert self.level, "it sleeps, and this thread put it to sleep"
                del self.live[number]
                return
        assert tokens_of(so_far) == self.right[self.weights][asked][: len(tokens_of(so_far))]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data):
        self.live.pop(data.draw(st.sampled_from(sorted(self.live))))[1].close()

    @rule(level=st.integers(1, 2))
    def sleep(self, level):
        self.runtime.sleep(level)
        self.level = max(self.level, level)
        self.are_there &= level == 1

    @rule()
    def wake(self):
        if not self.are_there and self.is_given:
            with pytest.raises(LoadError, match="give all of them again"):
                self.runtime.wake()
            return
        self.runtime.wake()
        self.level, self.are_there = 0, True

    @rule(to_other=st.booleans(), as_tensors=st.booleans(), is_part=st.booleans())
    def update(self, to_other, as_tensors, is_part):
        if to_other:
            for _, stream, _ in self.live.values():  # what they have is of these weights
                stream.close()
            self.live.clear()
            self.weights = 1 - self.weights
        weights = self.given[self.weights]
        if is_part and as_tensors and not to_other:
            weights = {name: one for name, one in weights.items() if "norm" in name}
            if not self.are_there:
                with pytest.raises(RequestError, match="wanted all weights"):
                    self.runtime.update_weights(weights)
                return
        self.runtime.update_weights(weights if as_tensors else self.folders[self.weights])
        self.is_given, self.are_there = as_tensors, True

    @rule()
    def spoil(self):
        with pytest.raises(RequestError, match="has shape"):
            self.runtime.update_weights({"model.norm.weight": self.given[0]["model.norm.weight"][:5]})

    @invariant()
    def says_whether_it_sleeps(self):
        assert self.runtime.is_sleeping == bool(self.level)

    def teardown(self):
        if self.level and not self.are_there and self.is_given:
            self.runtime.update_weights(self.given[self.weights])
        self.runtime.wake()
        self.level = 0
        for number in sorted(self.live):
            self.read(number, 20)
        stats = self.runtime.stats()
        assert not stats["blocks"]["used"] + stats["requests"]["running"] + stats["requests"]["waiting"]
        self.runtime.close()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way)))
def test_whatever_comes_between_answers_are_those_of_their_weights(tiny_folder, make_tiny_folder, way):
    folders = [tiny_folder, make_tiny_folder(seed=1)]
    given = [load_file(folder / "model.safetensors") for folder in folders]
    right = []
    for folder in folders:
        with Runtime.from_pretrained(folder, **SMALL | way) as alone:
            right.append(
                {
                    (p, s): alone.generate([prompt], params)[0].outputs[0].token_ids
                    for p, prompt in enumerate(PROMPTS)
                    for s, params in enumerate(PARAMS)
                }
            )

    own = {"folders": folders, "given": given, "right": right, "way": way}
    run_state_machine_as_test(type("Machine", (Machine,), own), settings=settings(stateful_step_count=25))
