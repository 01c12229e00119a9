"""When models make room for each other: what the policy says, in any order of events."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lamina.serving.model_swap.policy import Drain, EndRunning, ModelState, Rest, Resume, Swap, SwapPolicy

NAMES = ("a", "b", "c")
asleep, awake = ModelState(), ModelState(resident_since=0.0)


def state(**own) -> ModelState:
    return ModelState(**own)


@pytest.mark.parametrize(
    ("models", "now", "action"),
    [
        ({"a": awake, "b": asleep}, 100, Rest()),
        ({"a": awake, "b": state(waiting_since=7.0)}, 9, Rest(until=10.0)),
        ({"a": awake, "b": state(waiting_since=7.0)}, 10, Drain(model="a")),
        (
            {"a": state(resident_since=0.0, num_running=2), "b": state(waiting_since=7.0)},
            10,
            Drain(model="a"),
        ),
        (
            {
                "a": state(resident_since=0.0, num_running=2, draining_since=9.0),
                "b": state(waiting_since=7.0),
            },
            10,
            Rest(),
        ),
        (
            {"a": state(resident_since=0.0, draining_since=9.0), "b": state(waiting_since=7.0)},
            10,
            Swap(out="a", into="b"),
        ),
        (
            {"a": state(resident_since=0.0, num_running=1, draining_since=9.0), "b": asleep},
            10,
            Resume(model="a"),
        ),
        (
            {"a": awake, "b": state(waiting_since=7.0, is_available=False)},
            10,
            Rest(),
        ),
        ({"a": asleep, "b": state(waiting_since=7.0)}, 7, Swap(out=None, into="b")),
        ({"a": state(waiting_since=6.0), "b": state(waiting_since=5.0)}, 7, Swap(out=None, into="b")),
        (  # what waited through a residence waits anew
            {"a": state(waiting_since=1.0, left_at=6.0), "b": state(waiting_since=5.0)},
            7,
            Swap(out=None, into="b"),
        ),
        (  # live requests of a model that was put to sleep by hand
            {"a": state(num_running=1, left_at=6.0), "b": asleep},
            7,
            Swap(out=None, into="a"),
        ),
    ],
)
def test_one_step_of_two_models(models, now, action):
    assert SwapPolicy(min_residence=10.0).decide(models, now) == action


def test_of_two_that_are_awake_the_one_without_work_makes_room_then_the_one_that_came_first():
    policy, asking = SwapPolicy(max_resident=2, min_residence=5.0), state(waiting_since=3.0)
    busy = state(resident_since=0.0, num_running=1)
    assert policy.decide({"a": busy, "b": state(resident_since=4.0), "c": asking}, 9) == Drain(model="b")
    assert policy.decide({"a": busy, "b": state(resident_since=4.5), "c": asking}, 9) == Drain(model="a")
    later = state(resident_since=4.0, waiting_since=8.0)
    assert policy.decide({"a": busy, "b": later, "c": asking}, 9) == Drain(model="a")
    assert policy.decide({"a": busy, "b": later, "c": asking}, 4) == Rest(until=5.0)


def test_what_runs_of_a_model_that_is_drained_has_its_time_and_is_ended_then():
    policy, other = SwapPolicy(drain_timeout=4.0), state(waiting_since=7.0)
    busy = state(resident_since=0.0, num_running=2, draining_since=8.0)
    assert policy.decide({"a": busy, "b": other}, 11.5) == Rest(until=12.0)
    assert policy.decide({"a": busy, "b": other}, 12.0) == EndRunning(model="a")
    done = state(resident_since=0.0, draining_since=8.0)
    assert policy.decide({"a": done, "b": other}, 12.0) == Swap(out="a", into="b")


SWAP_SECONDS = {"a": 1.0, "b": 2.0, "c": 4.0}


@pytest.mark.parametrize(
    ("models", "seconds"),
    [
        ({"c": state(resident_since=8.0)}, 0.0),
        ({"a": state(resident_since=-50.0)}, 4.0),  # it may leave at once; to wake c takes 4
        ({"a": state(resident_since=8.0)}, 8.0 + 4.0),
        ({"a": state(resident_since=8.0, draining_since=9.0, num_running=3)}, 4.0),
        ({"a": state(resident_since=8.0), "b": state(waiting_since=9.0)}, 8.0 + 2.0 + 10.0 + 4.0),
        ({"a": state(resident_since=8.0), "b": state(waiting_since=9.0, is_available=False)}, 8.0 + 4.0),
        (  # c has asked before
            {"a": state(resident_since=8.0), "b": state(waiting_since=9.0), "c": state(waiting_since=8.5)},
            8.0 + 4.0,
        ),
        (  # it goes, and comes again after b
            {"c": state(resident_since=-50.0, draining_since=9.5), "b": state(waiting_since=9.0)},
            2.0 + 10.0 + 4.0,
        ),
        ({"a": awake, "c": state(is_available=False)}, None),
    ],
)
def test_when_a_model_may_be_awake_is_known_from_whose_turn_it_is_before(models, seconds):
    everyone = dict.fromkeys(NAMES, asleep) | models
    policy = SwapPolicy(min_residence=10.0)
    assert policy.seconds_until("c", everyone, 10.0, SWAP_SECONDS) == seconds


def test_of_two_places_the_first_that_is_free_is_the_next_ones():
    policy, both = SwapPolicy(max_resident=2, min_residence=10.0), state(resident_since=5.0)
    models = {"a": state(resident_since=3.0), "b": both, "c": asleep}
    assert policy.seconds_until("c", models, 10.0, SWAP_SECONDS) == 3.0 + 4.0
    assert policy.seconds_until("c", {**models, "b": asleep}, 10.0, SWAP_SECONDS) == 4.0


@dataclass
class World:
    """One model: its requests by when they came."""

    waiting: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    resident_since: float | None = None
    left_at: float = float("-inf")
    is_draining: bool = False
    is_lost: bool = False

    @property
    def seen(self) -> ModelState:
        return ModelState(
            resident_since=self.resident_since,
            left_at=self.left_at,
            waiting_since=min(self.waiting, default=None),
            num_running=len(self.running),
            draining_since=0.0 if self.is_draining else None,
            is_available=not self.is_lost,
        )


class Swapping(RuleBasedStateMachine):
    """Models that are asked, answer and lose clients in any order, with the policy obeyed at once."""

    max_resident, min_residence, most_running = 1, 4.0, 2

    def __init__(self) -> None:
        super().__init__()
        self.policy = SwapPolicy(max_resident=self.max_resident, min_residence=self.min_residence)
        self.now, self.models = 0.0, {name: World() for name in NAMES}
        self.overtaken: dict[str, int] = dict.fromkeys(NAMES, 0)  # wakings since each began to ask
        self.obey()

    def obey(self) -> None:
        """Does what the policy says until it says to rest."""
        for _ in range(20):
            for model in self.models.values():
                while model.resident_since is not None and not model.is_draining and model.waiting:
                    if len(model.running) >= self.most_running:
                        break
                    model.running.append(model.waiting.pop(0))
            action = self.policy.decide({name: model.seen for name, model in self.models.items()}, self.now)
            match action:
                case Rest():
                    self.rest = action
                    return
                case Drain():
                    self.models[action.model].is_draining = True
                case Resume():
                    assert self.models[action.model].is_draining
                    self.models[action.model].is_draining = False
                case Swap():
                    self.swap(action)
        raise AssertionError("the policy never rests")

    def swap(self, action: Swap) -> None:
        into = self.models[action.into]
        assert into.resident_since is None, "it is awake"
        assert into.waiting, "woken without a waiter"
        assert not into.is_lost
        if action.out is not None:
            out = self.models[action.out]
            assert out.resident_since is not None
            assert not out.running, "put to sleep before it was drained"
            assert out.resident_since + self.min_residence <= self.now, "it stayed too short"
            out.resident_since, out.left_at, out.is_draining = None, self.now, False
        self.now += 0.001  # a swap takes time
        into.resident_since = self.now
        for name, model in self.models.items():
            asks = model.resident_since is None and model.waiting and not model.is_lost
            self.overtaken[name] = self.overtaken[name] + 1 if asks else 0

    @rule(name=st.sampled_from(NAMES))
    def ask(self, name):
        self.models[name].waiting.append(self.now)
        self.obey()

    @rule(name=st.sampled_from(NAMES), index=st.integers(0, 9))
    def end(self, name, index):
        running = self.models[name].running
        if running:
            del running[index % len(running)]
            self.obey()

    @rule(name=st.sampled_from(NAMES), index=st.integers(0, 9))
    def leave(self, name, index):
        waiting = self.models[name].waiting
        if waiting:
            del waiting[index % len(waiting)]
            self.overtaken[name] = self.overtaken[name] if waiting else 0
            self.obey()

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds):
        self.now += seconds
        self.obey()

    @precondition(lambda self: sum(not model.is_lost for model in self.models.values()) > 1)
    @rule(name=st.sampled_from(NAMES))
    def lose(self, name):
        model = self.models[name]
        model.is_lost, model.resident_since, model.is_draining = True, None, False
        model.running, model.waiting = [], []
        self.obey()

    @invariant()
    def no_more_are_awake_than_may_be_and_one_at_most_is_drained(self):
        awake = [model for model in self.models.values() if model.resident_since is not None]
        assert len(awake) <= self.max_resident
        assert sum(model.is_draining for model in awake) <= 1
        assert not any(model.is_draining for model in self.models.values() if model not in awake)

    @invariant()
    def whoever_asks_is_waited_for_by_a_drain_or_a_time(self):
        asking = any(m.resident_since is None and m.waiting and not m.is_lost for m in self.models.values())
        draining = any(model.is_draining for model in self.models.values())
        if not asking:
            assert not draining
            assert self.rest.until is None
        elif not draining:
            assert self.rest.until is not None
            assert self.now < self.rest.until <= self.now + self.min_residence

    @invariant()
    def nobody_is_overtaken_more_than_once_by_each_other(self):
        assert max(self.overtaken.values()) < len(NAMES)

    def teardown(self) -> None:
        """Everything that still waits is served, once running requests end and time goes on."""
        for _ in range(200):
            self.now += self.min_residence
            for model in self.models.values():
                model.running.clear()
            self.obey()
            for model in self.models.values():
                if model.is_lost:
                    model.waiting.clear()  # the server refuses them
            if not any(model.waiting or model.running for model in self.models.values()):
                return
        raise AssertionError(f"somebody waits for ever: {self.models}")


class SwappingTwo(Swapping):
    """The same where two may be awake."""

    max_resident = 2


class SwappingAtOnce(Swapping):
    """The same without a minimum."""

    min_residence = 0.0


steps = settings(stateful_step_count=40)
TestSwapping = Swapping.TestCase
TestSwapping.settings = steps
TestSwappingTwo = SwappingTwo.TestCase
TestSwappingTwo.settings = steps
TestSwappingAtOnce = SwappingAtOnce.TestCase
TestSwappingAtOnce.settings = steps
