"""Prefix-cache hits: the right blocks, only while they hold what was committed, never a token too many."""

import pytest

from lamina import SamplingParams
from lamina.runtime.kv_cache.prefix_cache import PrefixCache
from lamina.runtime.scheduler.request import RequestStatus

ON = {"prefix_cache": True}


def served(server, name, prompt, **params):
    """A request after which nothing is live, checked against what it gets alone."""
    request = server.add(name, prompt, **{"max_tokens": 3} | params)
    server.drain()
    assert request.output_token_ids == server.alone(request)[0]
    return request


def constant_hash(monkeypatch):
    monkeypatch.setattr(PrefixCache, "digest", lambda self, contents: b"the same for all")


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 12, 13])
def test_a_prompt_that_comes_again_is_found_but_for_its_last_token(make_server, length):
    server = make_server(blocks=20, **ON)
    first, second = served(server, "a", length), served(server, "b", length)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, (length - 1) // 4 * 4)
    assert first.output_token_ids == second.output_token_ids
    assert server.scheduler.num_queried_tokens == 2 * length
    assert server.scheduler.num_hit_tokens == second.num_cached_tokens


def test_without_a_prefix_cache_nothing_is_found_and_nothing_kept(make_server):
    server = make_server(blocks=20, prefix_cache=False)
    served(server, "a", 12)
    assert served(server, "b", 12).num_cached_tokens == 0
    assert server.pool.num_free == 20


def test_the_answer_is_part_of_what_the_next_turn_finds(make_server):
    server = make_server(blocks=20, **ON)
    first = served(server, "a", 6, max_tokens=7)  # 13 tokens, the last of which was never computed
    turn = (*first.prompt_token_ids, *first.output_token_ids, 1, 2, 3)
    assert served(server, "b", turn).num_cached_tokens == 12


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_that_come_together_compute_what_they_share_once_in_the_same_step(make_server, depth):
    server = make_server(blocks=40, depth=depth, **ON)
    common = (1, 2, 3, 4) * 4
    requests = [server.add(str(n), (*common, n), max_tokens=2) for n in range(4)]
    plan = server.launch()
    assert plan.num_scheduled_tokens.tolist() == [17, 1, 1, 1]
    server.land()
    server.drain()
    assert [r.num_cached_tokens for r in requests] == [0, 16, 16, 16]
    assert all(r.output_token_ids == server.alone(r)[0] for r in requests)


def test_chunks_of_a_prompt_are_shared_as_they_are_computed(make_server):
    server = make_server(blocks=40, budget=8, **ON)
    old, young = server.add("old", 20, max_tokens=2), server.add("young", 20, max_tokens=2)
    assert [server.parts(server.step())[0].num_computed for _ in range(2)] == [0, 8]
    server.drain()
    assert young.num_cached_tokens == 16
    assert old.output_token_ids == young.output_token_ids == server.alone(old)[0]


@pytest.mark.parametrize("number", [0, 1])
def test_what_a_failed_step_was_to_fill_is_forgotten_with_those_who_found_it(make_server, number):
    server = make_server(blocks=40, depth=3, budget=8, **ON)
    old = server.add("old", 12, max_tokens=3)
    server.launch()
    server.launch()  # the rest of it, and its tokens are not read
    young = server.add("young", 12, max_tokens=3)
    server.launch()
    assert young.num_cached_tokens == 8
    server.fail(number)
    left = (RequestStatus.PREEMPTED, 0) if number == 0 else (RequestStatus.RUNNING, 3)
    assert (young.status, server.kv_cache.num_blocks("young")) == left
    server.drain()
    for request in (old, young):
        assert request.output_token_ids == server.alone(request)[0]


def test_a_prompt_that_waits_does_not_count_on_blocks_that_are_gone_when_it_is_admitted(make_server):
    server = make_server(blocks=8, **ON)
    served(server, "before", (1, 2, 3, 4) * 3 + (5,), max_tokens=1)
    hog = server.add("hog", 20, seed=3, max_tokens=12)  # all blocks in the end, cached ones included
    server.step()
    late = server.add("late", (1, 2, 3, 4) * 3 + (6,), max_tokens=3)
    while hog.finish_reason is None:
        server.step()
    server.drain()
    assert late.num_cached_tokens == 0
    assert late.output_token_ids == server.alone(late)[0]


def test_equal_hashes_of_other_tokens_are_no_hit(make_server, monkeypatch):
    constant_hash(monkeypatch)
    server = make_server(blocks=40, **ON)
    for seed in range(6):
        assert served(server, str(seed), 13, seed=seed).num_cached_tokens == 0
    assert served(server, "again", 13, seed=0).num_cached_tokens == 4  # one block can have that hash


@pytest.mark.parametrize("is_constant", [False, True])
def test_equal_tokens_after_other_ones_are_no_hit(make_server, monkeypatch, is_constant):
    if is_constant:
        constant_hash(monkeypatch)
    server = make_server(blocks=40, **ON)
    served(server, "a", (1,) * 4 + (7,) * 4 + (0,))
    assert served(server, "b", (2,) * 4 + (7,) * 4 + (0,)).num_cached_tokens == 0


def test_only_requests_of_one_salt_share(make_server):
    server = make_server(blocks=40, **ON)
    salts = ["", "mine", "yours", "mine", ""]
    found = [served(server, str(n), 13, options={"cache_salt": s}) for n, s in enumerate(salts)]
    assert [request.num_cached_tokens for request in found] == [0, 0, 0, 12, 12]


def test_a_block_in_use_by_another_is_never_handed_out_when_its_first_owner_ends(make_server):
    server = make_server(blocks=12, **ON)
    common = (1, 2, 3, 4) * 3
    ending = server.add("ending", (*common, 5), max_tokens=1)
    staying = server.add("staying", (*common, 6), max_tokens=12)
    server.step()
    shared = server.kv_cache.block_ids("staying")[:3]
    assert ending.finish_reason == "length"
    taker = server.add("taker", 16, seed=9, max_tokens=12)
    while taker.finish_reason is None:
        server.step()
        if taker.row >= 0:
            assert not {*shared} & {*server.kv_cache.block_ids("taker")}
    server.drain()
    for request in (staying, taker):
        assert request.output_token_ids == server.alone(request)[0]


def test_the_end_of_what_was_used_least_recently_goes_first(make_server):
    server = make_server(blocks=8, **ON)
    served(server, "old", (1,) * 13, max_tokens=1)
    served(server, "new", (2,) * 13, max_tokens=1)
    served(server, "other", (3,) * 13, max_tokens=1)  # needs four blocks: two free ones, two of old
    assert served(server, "old again", (1,) * 13, max_tokens=1).num_cached_tokens == 4


def test_a_preempted_request_finds_what_nobody_took(make_server):
    server = make_server(blocks=10, **ON)
    requests = [server.add(name, 5, seed, max_tokens=24) for seed, name in enumerate("ab")]
    plans = server.drain()
    resumed = [p for plan in plans for p in server.parts(plan) if len(p.token_ids) > 1][2:]
    assert resumed
    assert all(part.num_computed > 0 for part in resumed)
    assert all(request.output_token_ids == server.alone(request)[0] for request in requests)


def test_a_failed_growth_drops_nothing_from_the_cache(make_server):
    server = make_server(blocks=8, **ON)
    served(server, "a", 13, max_tokens=1)
    before = server.pool.num_cached, server.pool.num_free, len(server.kv_cache.prefix)
    request = server.add("b", 5, seed=1)
    assert server.kv_cache.admit(request, 5, num_reusable=4, spare_blocks=7) is None
    assert (server.pool.num_cached, server.pool.num_free, len(server.kv_cache.prefix)) == before


def test_what_is_known_stays_as_small_as_the_cache(make_server):
    server = make_server(blocks=8, **ON)
    for number in range(200):
        served(server, str(number), 9, seed=number, max_tokens=2)
        server.scheduler.check()
    assert len(server.kv_cache.prefix) == server.pool.num_cached <= 8


def test_a_runtime_tells_what_it_found_and_gives_the_same_tokens(open_runtime):
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=8, ignore_eos=True)
    prompt = [5, 6, 7, 8] * 5
    settings = {"dtype": "float64", "block_size": 4}
    runtime, without = open_runtime(**settings), open_runtime(**settings, prefix_cache=False)
    first, second = (runtime.generate([prompt], params)[0] for _ in range(2))
    (right,) = without.generate([prompt], params)
    assert first.outputs == second.outputs == right.outputs
    assert (first.num_cached_tokens, second.num_cached_tokens, right.num_cached_tokens) == (0, 16, 0)
    assert runtime.stats()["prefix_cache"] == {"queried_tokens": 40, "hit_tokens": 16}
    assert without.stats()["blocks"]["cached"] == 0
    salted = runtime.generate([prompt], params, cache_salt="mine")[0]
    assert salted.num_cached_tokens == 0
    assert salted.outputs == right.outputs
