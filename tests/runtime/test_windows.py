"""Where every layer sees a window alone: blocks out of it are given back, and nobody's tokens change."""

import pytest

from lamina import Runtime, SamplingParams
from lamina.runtime.startup import memory

from ..families import FAMILIES

WINDOW = 10


def windowed(make_server, **limits):
    return make_server(**{"blocks": 20, "window": WINDOW, "prefix_cache": True} | limits)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_an_answer_keeps_its_window_and_two_blocks_more_however_long_it_grows(
    make_server, depth, prefix_cache
):
    server = windowed(make_server, depth=depth, prefix_cache=prefix_cache)
    request = server.add("a", 9, max_tokens=60)
    most = 0
    while server.scheduler.has_work:
        server.step()
        most = max(most, server.pool.num_used)
    assert most == {1: 3, 2: 4}[depth]
    assert request.output_token_ids == server.alone(request)[0]
    assert len(request.output_token_ids) == 60


def test_what_one_gives_back_lets_another_in(make_server):
    server = windowed(make_server, blocks=8, prefix_cache=False)
    long = server.add("long", 12, max_tokens=18)
    for _ in range(12):
        server.step()
    young = server.add("young", 10, seed=1, max_tokens=6)
    server.step()
    assert young.row >= 0, "with all blocks of 24 tokens held, three for it would be missing"
    server.drain()
    assert server.scheduler.num_preemptions == 0
    for request in (long, young):
        assert request.output_token_ids == server.alone(request)[0]


def test_a_prompt_is_found_again_after_its_blocks_were_given_back(make_server):
    server = windowed(make_server)
    first = server.add("first", 24, max_tokens=12)
    while len(first.output_token_ids) < 6:
        server.step()
    assert server.kv_cache.block_ids("first")[:5] == (0,) * 5
    again = server.add("again", 24, max_tokens=4)
    server.drain()
    assert again.num_cached_tokens == 20
    turn = server.add("turn", (*first.prompt_token_ids, *first.output_token_ids, 1), max_tokens=2)
    server.drain()
    assert turn.num_cached_tokens == 32, "the answer's blocks were kept as they were given back"
    for request in (first, again, turn):
        assert request.output_token_ids == server.alone(request)[0]


def test_what_was_given_back_and_forgotten_is_not_found_nor_what_follows_it(make_server):
    server = windowed(make_server, blocks=8)
    first = server.add("first", 16, max_tokens=12)
    while len(first.output_token_ids) < 3:
        server.step()
    other = server.add("other", 12, seed=1, max_tokens=2)  # takes what first has given back
    while other.finish_reason is None:
        server.step()
    again = server.add("again", 16, max_tokens=2)
    server.drain()
    assert again.num_cached_tokens == 0
    for request in (first, other, again):
        assert request.output_token_ids == server.alone(request)[0]


@pytest.mark.parametrize("name", ["mistral", "phi3"])
def test_requests_of_a_model_with_windows_fit_where_whole_ones_would_give_way(tmp_path, monkeypatch, name):
    """With the kernels that serve: they read nothing of what was given back."""
    folder = FAMILIES[name].save(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    prompts = [[(37 * i + 11 * n) % 317 + 3 for i in range(3 + 5 * n)] for n in range(4)]
    settings = {"dtype": "float64", "compile": False, "block_size": 4, "max_model_len": 128}

    def serve(**more):
        with Runtime.from_pretrained(folder, device="cpu", **settings, **more) as runtime:
            outputs = [output.outputs[0].token_ids for output in runtime.generate(prompts, params)]
            return outputs, runtime.stats()["preemptions"]

    right, _ = serve()
    assert serve(num_kv_blocks=28) == (right, 0)
    whole_layers = memory.LayerGroup(window=None, layers=tuple(range(4)))
    monkeypatch.setattr(memory, "layer_groups", lambda model: (whole_layers,))
    whole, num_preemptions = serve(num_kv_blocks=28)
    assert whole == right
    assert num_preemptions > 0


def test_layers_are_grouped_by_how_far_they_see_where_they_differ(tmp_path):
    from lamina.models.config import read_model_config

    found = {}
    changes = {"llama-chunks": {"layer_types": ["chunked_attention"] * 4}}
    for name in ("mistral", "phi3", "gemma2", "gemma3", "qwen2-windows", "qwen3", "llama-chunks"):
        FAMILIES[name].config(**changes.get(name, {})).save_pretrained(tmp_path / name)
        groups = memory.layer_groups(read_model_config(tmp_path / name))
        found[name] = [(group.window, *group.layers) for group in groups]
    assert found == {
        "mistral": [(5, 0, 1, 2, 3)],
        "phi3": [(5, 0, 1, 2, 3)],
        "llama-chunks": [(7, 0, 1, 2, 3)],
        "gemma2": [(None, 1, 3), (5, 0, 2)],
        "gemma3": [(None, 2), (5, 0), (5, 1), (5, 3)],
        "qwen2-windows": [(None, 0, 1), (5, 2, 3)],
        "qwen3": [(None, 0, 1, 2, 3)],
    }
