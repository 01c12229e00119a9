"""Layers that see everything beside layers that see a window: each kind has blocks of its own."""

from functools import partial
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from lamina import Runtime, SamplingParams
from lamina.runtime.kv_cache.block_pool import BlockPool
from lamina.runtime.kv_cache.manager import KVCacheManager
from lamina.runtime.startup import memory

from ..families import FAMILIES
from .scheduler.test_scheduler_states import SchedulerMachine

WINDOW = 10


def with_groups(make_server, *, window, swap, **limits):
    """A server with a further KV-cache group or two, one of which sees what was drawn as the window.

    Groups do not swap.
    """
    return make_server(
        further_windows=(None, 2) if window is None else (window,) * (1 + window % 2), **limits
    )


def run_programs(make_server, examples, **options):
    limits = settings(max_examples=examples, stateful_step_count=20, deadline=None, **options)
    run_state_machine_as_test(partial(SchedulerMachine, partial(with_groups, make_server)), settings=limits)


def test_any_sequence_of_events_gives_each_request_its_own_tokens(make_server):
    run_programs(make_server, 3 * settings.default.max_examples)


def _release_one_too_many(self, tokens, num_computed, step, release=KVCacheManager.release):
    release(self, tokens, num_computed + self.block_size, step)


def _all_is_usable(self, entries):
    return len(entries)


MUTANTS = {
    "a block is given back too soon": (KVCacheManager, "release", _release_one_too_many),
    "a prefix is a hit of which a window is gone": (KVCacheManager, "_usable", _all_is_usable),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_way_to_get_it_wrong_is_noticed(make_server, mutant):
    with patch.object(*MUTANTS[mutant]), pytest.raises((AssertionError, KeyError, IndexError)):
        run_programs(make_server, 5000, phases=[Phase.generate], suppress_health_check=[*HealthCheck])


def test_an_answer_holds_all_blocks_of_one_group_and_a_window_of_the_other(make_server):
    server = make_server(blocks=20, further_windows=(WINDOW,), prefix_cache=True)
    request = server.add("a", 9, max_tokens=60)
    while len(request.output_token_ids) < 59:
        server.step()
    assert len(server.kv_cache.block_ids("a")) == 17
    held = [block for block in server.kv_cache.block_ids("a", group=1) if block]
    assert len(held) == 3 == server.pool.num_used - 17
    server.drain()
    assert request.output_token_ids == server.alone(request)[0]


def test_a_prefix_is_a_hit_as_far_as_every_group_holds_what_it_would_see(make_server):
    server = make_server(blocks=40, further_windows=(WINDOW,), prefix_cache=True)
    first = server.add("first", 33, max_tokens=2)
    server.drain()
    again = server.add("again", 33, max_tokens=2)
    server.step()
    assert again.num_cached_tokens == 32
    assert server.kv_cache.block_ids("again", group=1)[:5] == (0,) * 5, "what no layer will see is not held"
    server.drain()
    cache = server.kv_cache
    further = [entry.further[0] for entry in cache.prefix.match(cache._chain(first), 8)]
    cache.pool.drop(cache.prefix.evict(further[6]))
    third = server.add("third", 33, max_tokens=2)
    server.step()
    assert third.num_cached_tokens == 24, "tokens 15 to 23 are held by both groups"
    server.drain()
    fourth = server.add("fourth", 33, max_tokens=2)
    server.drain()
    assert fourth.num_cached_tokens == 32, "what was evicted of one group is committed anew"
    for request in (first, again, third, fourth):
        assert request.output_token_ids == server.alone(request)[0]


def test_a_block_of_one_group_that_a_failed_step_committed_anew_is_evicted():
    cache = KVCacheManager(BlockPool(30), 2, prefix_cache=True, windows=(None, 3))

    class Tokens:
        cache_salt = ""

        def __init__(self, request_id):
            self.request_id = request_id

        def token_bytes(self, start, stop):
            return bytes(4 * (stop - start))

    first, second, third = map(Tokens, ("first", "second", "third"))
    cache.admit(first, 5)
    cache.commit(first, 4, step=1)
    cache.pool.drop(cache.prefix.evict(cache.block_ids("first", group=1)[1]))
    assert cache.admit(second, 5, num_reusable=4) == 2
    cache.commit(second, 4, step=2)
    assert cache.uncommit(2) == []
    assert cache.admit(third, 5, num_reusable=4) == 2, "nobody has written what the failed step had committed"
    cache.check({"first": 4, "second": 2, "third": 2})


@pytest.mark.parametrize("name", ["gemma3", "llama-chunks"])
def test_requests_of_a_model_with_both_kinds_fit_where_whole_ones_would_give_way(tmp_path, monkeypatch, name):
    """With the kernels that serve, alone and together: they read nothing of what was given back."""
    folder = FAMILIES[name].save(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [[(37 * i + 11 * n) % 317 + 3 for i in range(3 + 5 * n)] for n in range(4)]
    settings = {"dtype": "float64", "compile": False, "block_size": 4, "max_model_len": 128}

    def serve(prompts, **more):
        with Runtime.from_pretrained(folder, device="cpu", **settings, **more) as runtime:
            outputs = [output.outputs[0].token_ids for output in runtime.generate(prompts, params)]
            return outputs, runtime.stats()["preemptions"]

    together = serve(prompts, num_kv_blocks=54)
    assert together[1] == 0
    assert [serve([prompt])[0][0] for prompt in prompts] == together[0]
    whole_layers = memory.LayerGroup(window=None, layers=tuple(range(4)))
    monkeypatch.setattr(memory, "layer_groups", lambda model: (whole_layers,))
    whole, num_preemptions = serve(prompts, num_kv_blocks=54)
    assert whole == together[0]
    assert num_preemptions > 0
