"""Decision logs: decided again they come out the same, hold no text, and the first difference is named."""

import json
import random

import pytest
import typer

from lamina import ConfigError, LoadError, SamplingParams
from lamina.cli.replay import replay as replay_command
from lamina.runtime.scheduler.admission import Admission
from lamina.runtime.scheduler.decision_log import DecisionLog, open_decision_log
from lamina.runtime.scheduler.replay import replay
from lamina.runtime.scheduler.scheduler import Scheduler


@pytest.fixture
def record(make_server, tmp_path):
    """record(**limits) -> a server whose scheduler writes to the path that comes with it."""
    files = []

    def make(**limits):
        server = make_server(**limits)
        path = tmp_path / f"{len(files)}.jsonl"
        files.append(open_decision_log(path))
        server.scheduler = Scheduler(server.config, server.kv_cache, DecisionLog(files[-1]))
        return server, path

    yield make
    for file in files:
        file.close()


def traffic(server, seed, count=60, longest=12):
    """Requests that begin alike or not, of which some are aborted, stopped, or lose a step."""
    source = random.Random(seed)
    for number in range(count):
        options = {"priority": source.randint(-1, 1), "cache_salt": source.choice(["", "salt"])}
        length = source.randint(1, 12)
        server.add(
            str(number),
            length,
            source.randint(0, 3),
            max_tokens=source.randint(1, longest),
            min_tokens=source.randint(0, 1),
            prompt_logprobs=source.choice([None, None, 0]),
            options=options,
        )
        for _ in range(source.randint(0, 3)):
            server.step()
        if source.random() < 0.1:
            server.scheduler.abort(str(source.randint(0, number)))
        if server.pending and source.random() < 0.1:
            server.fail(source.randrange(len(server.pending)))
    server.drain()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize(
    "blocks, block_size, chunk, window, forced",
    [(8, 2, 3, None, 0), (6, 4, None, None, 9), (6, 2, 3, 5, 0), (8, 2, 3, None, 5)],
)
def test_what_was_logged_is_decided_again(
    record, depth, prefix_cache, blocks, block_size, chunk, window, forced
):
    limits = {"blocks": blocks, "block_size": block_size, "chunk": chunk, "window": window}
    server, path = record(**limits, depth=depth, prefix_cache=prefix_cache, eos=(5,), forced=forced)
    traffic(server, seed=depth)
    assert (server.scheduler.num_forced_tokens > 0) == (forced > 0)
    result = replay(path)
    assert result.difference is None
    assert result.num_requests == 60
    assert result.num_preemptions == server.scheduler.num_preemptions
    assert window or result.num_preemptions > 0
    assert result.num_hit_tokens == server.scheduler.num_hit_tokens
    assert (result.num_hit_tokens > 0) == prefix_cache


@pytest.mark.parametrize("depth", [1, 2])
def test_what_went_to_the_host_and_back_does_so_in_the_replay(record, depth):
    server, path = record(blocks=12, block_size=2, depth=depth, prefix_cache=True, swap=6, context=30)
    traffic(server, seed=depth, longest=30)
    assert server.kv_cache.swap.num_in > 0
    assert replay(path).difference is None
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (first, *_) = [number for number, said in enumerate(lines) if "swap_in" in said]
    lines[first]["swap_in"][0][0] += 1
    path.write_text("\n".join(map(json.dumps, lines)))
    assert replay(path).difference.startswith(f"line {first + 1}, ")


def test_a_conversation_is_a_hit_again_in_the_replay(record):
    server, path = record(blocks=30, prefix_cache=True)
    first = server.add("a", 6, max_tokens=7)
    server.drain()
    turn = server.add("b", (*first.prompt_token_ids, *first.output_token_ids, 1, 2, 3), max_tokens=2)
    server.drain()
    assert turn.num_cached_tokens == 12
    result = replay(path)
    assert (result.difference, result.num_hit_tokens) == (None, 12)


def follow_a_live_answer(server, name):
    """A request whose prompt goes on from the answer that another one, still live, has so far."""
    source = server.requests[name]
    prompt = (*source.prompt_token_ids, *source.output_token_ids, 1)
    follower = server.add("follower", prompt, max_tokens=1, options={"priority": -1})
    while follower.finish_reason is None:
        server.step()
    assert follower.num_cached_tokens > len(source.prompt_token_ids)
    assert source.finish_reason is None


@pytest.mark.parametrize("depth", [1, 2])
def test_an_answer_that_is_not_at_its_end_with_the_log_is_a_hit_in_the_replay(record, depth):
    server, path = record(blocks=10, prefix_cache=True, depth=depth)
    for seed, name in enumerate("ab"):
        server.add(name, 5, seed, max_tokens=24)
    while not server.requests["b"].num_preemptions:
        server.step()
    follow_a_live_answer(server, "b")
    result = replay(path)
    assert (result.difference, result.num_hit_tokens) == (None, server.scheduler.num_hit_tokens)


def test_so_is_one_whose_first_blocks_have_left_every_window(record):
    server, path = record(blocks=20, prefix_cache=True, window=5)
    server.add("a", 5, max_tokens=40)
    while len(server.requests["a"].output_token_ids) < 20:
        server.step()
    follow_a_live_answer(server, "a")
    result = replay(path)
    assert (result.difference, result.num_hit_tokens) == (None, server.scheduler.num_hit_tokens)


def test_a_decision_log_has_numbers_of_tokens_and_no_token(record):
    texts = []
    for first in (1, 2):
        server, path = record(blocks=30, prefix_cache=True, next_token=lambda prefix, banned: prefix[0])
        server.add("a", (first,) * 9, max_tokens=4)
        server.drain()
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert lines[1].pop("queued") > 0
        texts.append(lines)
    assert texts[0] == texts[1]
    assert texts[0][1]["blocks"] == [0, 1]


def test_a_step_like_the_last_one_takes_a_few_bytes(record):
    server, path = record(blocks=400, seqs=64, budget=512, context=64)
    for number in range(64):
        server.add(str(number), 8, number, max_tokens=40)
    server.drain()
    lines = path.read_text().splitlines()
    plans = sorted(len(line) for line in lines if "plan" in json.loads(line))
    assert plans[len(plans) // 2] < 60


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda said: said | {"new_blocks": [[0, 0, 7]]}, "new_blocks was [[0, 0, 7]], is now [[0, 0, 1]"),
        (lambda said: said | {"counts": [4]}, "counts was [4], is now [5]"),
        (lambda said: said | {"preempted": ["a"]}, "preempted was ['a'], is now None"),
    ],
)
def test_the_first_decision_that_differs_is_named(record, change, named, capsys):
    server, path = record(blocks=8)
    server.add("a", 5, max_tokens=6)
    server.drain()
    lines = path.read_text().splitlines()
    lines[2] = json.dumps(change(json.loads(lines[2])))
    path.write_text("\n".join(lines))
    result = replay(path)
    assert named in result.difference
    assert result.difference.startswith("line 3, ")
    with pytest.raises(typer.Exit):
        replay_command(path)
    assert named in capsys.readouterr().out


def test_another_scheduler_is_found_out(record, monkeypatch):
    server, path = record(blocks=8, seqs=3)
    traffic(server, seed=0)
    monkeypatch.setattr(Admission, "_spare_blocks", lambda self, request: 0)
    assert replay(path).difference is not None


def test_a_decision_log_cut_off_by_a_crash_is_decided_as_far_as_it_goes(record):
    server, path = record(blocks=8)
    server.add("a", 5, max_tokens=6)
    server.drain()
    whole = path.read_text()
    path.write_text(whole[: len(whole) - 20])
    assert replay(path).difference is None


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "no decision log of format 4"),
        ('{"lamina":1}\n', "no decision log of format 4"),
        ('{"lamina":4}\n{}\n', "the first line is not that of a decision log"),
        ('{"lamina":4}\nx\n{}\n', "line 2 is no JSON"),
        ("[]\n[]\n", "line 1 is []; wanted a JSON object"),
    ],
)
def test_what_is_no_decision_log_is_refused(tmp_path, text, message):
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(LoadError) as error:
        replay(path)
    assert message in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(LoadError, match="nowhere cannot be read"):
        replay(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"record is .*, which cannot be written"):
        open_decision_log(tmp_path / "nowhere" / "file")


def test_a_runtime_records_what_its_scheduler_decides(open_runtime, tmp_path, capsys):
    path = tmp_path / "decisions.jsonl"
    runtime = open_runtime(record=path, block_size=4, num_kv_blocks=14)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=16)
    prompts = [[5, 6, 7, 8] * 3 + [number] for number in range(6)]
    runtime.generate(prompts, params)
    stats = runtime.stats()
    runtime.close()
    replay_command(path)
    said = capsys.readouterr().out
    assert "of 6 requests, decided as they were" in said
    assert f"{stats['preemptions']} preemptions" in said
    assert f"{stats['prefix_cache']['hit_tokens']} tokens hit in the prefix cache" in said
