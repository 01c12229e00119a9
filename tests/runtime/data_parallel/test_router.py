"""Which engine a request is given to, over any order of coming, beginning, ending and losing."""

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from lamina.runtime.data_parallel.router import ANSWER, Router, most_ahead

ENGINES = 3
BLOCK = 4
BEGINNINGS = [[], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8], [9] * 12, [9] * 14]
prompts = st.builds(
    lambda start, rest: start + rest,
    st.sampled_from(BEGINNINGS),
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
)


def new_router(num_blocks=65_536):
    return Router(ENGINES, block_size=BLOCK, num_blocks=num_blocks)


class Traffic(RuleBasedStateMachine):
    """Two routers that hear the same, and a plain account of who has what and who knows what."""

    live = Bundle("live")

    def __init__(self):
        super().__init__()
        self.router, self.twin = new_router(), new_router()
        self.left = {}  # engine and uncomputed tokens of each live request
        self.known = [set() for _ in range(ENGINES)]  # beginnings of whole blocks, with their salts
        self.number = 0

    def load(self, engine):
        return sum(ANSWER + tokens for own, tokens in self.left.values() if own == engine)

    def known_blocks(self, engine, prompt, salt):
        blocks = 0
        while (salt, *prompt[: BLOCK * (blocks + 1)]) in self.known[engine] and BLOCK * (blocks + 1) <= len(
            prompt
        ):
            blocks += 1
        return blocks

    @rule(
        target=live,
        prompt=prompts,
        repeated=st.sampled_from([1, 100, 400]),
        salt=st.sampled_from(["", "a"]),
        count=st.sampled_from([1, 2, 12]),
        usable=st.sets(st.integers(0, ENGINES - 1), min_size=1),
    )
    def give(self, prompt, repeated, salt, count, usable):
        prompt = prompt + [0] * (repeated - 1)
        ids = [f"{self.number + index}" for index in range(count)]
        self.number += count
        usable = sorted(usable)
        loads = {engine: self.load(engine) for engine in usable}
        matches = {engine: self.known_blocks(engine, prompt, salt) for engine in usable}
        chosen = self.router.give(ids, prompt, salt, usable)
        assert self.twin.give(ids, prompt, salt, usable) == chosen
        least = min(loads.values())
        allowed = [engine for engine in usable if loads[engine] - least <= most_ahead(least)]
        assert chosen in allowed, "a known beginning overloads an engine"
        assert matches[chosen] == max(matches[engine] for engine in allowed), (
            "a known beginning is passed over"
        )
        alike = [engine for engine in allowed if matches[engine] == matches[chosen]]
        assert loads[chosen] == min(loads[engine] for engine in alike), "a busier engine takes it"
        tokens = len(prompt) - BLOCK * matches[chosen]
        for request_id in ids:
            self.left[request_id] = [chosen, tokens]
            tokens = 0
        self.known[chosen] |= {(salt, *prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)}
        return multiple(*ids)

    @rule(request_id=live)
    def begin(self, request_id):
        for router in (self.router, self.twin):
            router.began(request_id)
        if request_id in self.left:
            self.left[request_id][1] = 0

    @rule(request_id=consumes(live))
    def end(self, request_id):
        for router in (self.router, self.twin):
            router.ended(request_id)
            router.ended(request_id)  # harmless
        self.left.pop(request_id, None)

    @rule(engine=st.integers(0, ENGINES - 1))
    def lose(self, engine):
        expected = [request_id for request_id, (own, _) in self.left.items() if own == engine]
        assert self.router.lose(engine) == self.twin.lose(engine) == expected
        for request_id in expected:
            del self.left[request_id]
        self.known[engine] = set()

    @rule()
    def forget(self):
        for router in (self.router, self.twin):
            router.forget_prefixes()
        self.known = [set() for _ in range(ENGINES)]

    @invariant()
    def loads_are_those_of_who_is_live(self):
        assert self.router.loads == [self.load(engine) for engine in range(ENGINES)]
        assert sum(self.router.num_live) == len(self.left)
        for request_id, (engine, _) in self.left.items():
            assert self.router.engine_of(request_id) == engine

    def teardown(self):
        for request_id in [*self.left]:
            self.router.ended(request_id)
        assert self.router.loads == self.router.num_live == [0] * ENGINES


TestTraffic = Traffic.TestCase


def test_requests_that_come_one_by_one_take_turns_where_nobody_knows_them():
    router = new_router()
    given = []
    for number in range(6):
        given.append(router.give([str(number)], [number] * 9, "", range(ENGINES)))
        router.ended(str(number))
    assert given == [0, 1, 2, 0, 1, 2]


def test_a_beginning_that_all_ask_for_goes_to_others_once_the_first_is_too_busy():
    router = new_router()
    shared = [1] * 64
    given = [router.give([str(n)], [*shared, n], "", range(ENGINES)) for n in range(40)]
    assert given[:9] == [0] * 8 + [1]
    assert {*given[8:]} == {0, 1, 2}
    assert max(router.num_live) - min(router.num_live) <= 9


def test_of_a_cache_that_is_full_the_least_recently_given_beginning_is_forgotten():
    router = new_router(num_blocks=2)
    first, second = [1] * 8, [2] * 8
    assert router.give(["a"], first, "", range(ENGINES)) == 0
    assert router.give(["b"], second, "", [0]) == 0
    assert router.give(["c"], first, "", [1, 2]) == 1
    for request_id in "abc":
        router.ended(request_id)
    assert router.give(["d"], first, "", range(ENGINES)) == 1  # engine 0 has only the second


def test_without_a_prefix_cache_load_alone_decides():
    router = Router(2, block_size=BLOCK, num_blocks=0)
    assert [router.give([str(n)], [1] * 8, "", range(2)) for n in range(4)] == [0, 1, 0, 1]
