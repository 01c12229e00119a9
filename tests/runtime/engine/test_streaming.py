"""Streams: what they add up to, and that nothing is left of one that is closed, dropped or never read."""

import gc
import itertools

import pytest

from lamina import RequestError, SamplingParams
from lamina.runtime.worker.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def text_of(deltas):
    return "".join(delta.text for delta in deltas)


def tokens_of(deltas):
    return tuple(token for delta in deltas for token in delta.token_ids)


@pytest.fixture
def runtime(open_runtime, tiny_text_folder):
    return open_runtime(tiny_text_folder)


@pytest.mark.parametrize("stop", [None, "x", ["zz", "h"]])
@pytest.mark.parametrize("prompt", ["hello", "the world", "🙂", "a\ud7ffb"])
def test_a_stream_adds_up_to_the_whole_answer(runtime, prompt, stop):
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=40, stop=stop)
    whole = runtime.generate(prompt, params)[0].outputs[0]
    deltas = list(runtime.stream(prompt, params))
    assert text_of(deltas) == whole.text
    assert tokens_of(deltas) == whole.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [whole.finish_reason]
    assert {(delta.request_id, delta.index) for delta in deltas} == {(deltas[0].request_id, 0)}


def test_a_chat_streams_what_it_answers(runtime):
    messages = [{"role": "user", "content": "hello"}]
    assert text_of(runtime.stream_chat(messages, GREEDY)) == runtime.chat(messages, GREEDY).text


def test_tools_reach_the_template_of_a_chat_streamed_or_not(open_runtime, bbpe_tokenizer):
    tokenizer, tools = bbpe_tokenizer(), [{"type": "function", "function": {"name": "weather"}}]
    tokenizer.chat_template = "{{ bos_token }}{{ tools|tojson }}{{ messages[0].content }}"
    runtime, messages = open_runtime(tokenizer=tokenizer), [{"role": "user", "content": "hello"}]
    answer = runtime.chat(messages, GREEDY, tools=tools)
    told = '[{"type": "function", "function": {"name": "weather"}}]hello'
    assert tokenizer.decode(answer.prompt_token_ids) == "<s>" + told
    assert text_of(runtime.stream_chat(messages, GREEDY, tools=tools)) == answer.text
    with pytest.raises(RequestError, match="tools is 5; wanted"):
        runtime.stream_chat(messages, GREEDY, tools=5)


def test_streams_read_in_turns_with_a_call_between_keep_their_own_tokens(runtime):
    right = [runtime.generate([[seed]], GREEDY)[0].outputs[0].token_ids for seed in range(3)]
    streams = [runtime.stream([seed], GREEDY) for seed in range(3)]
    received = [[], [], []]
    for number in itertools.chain([0, 1, 1, 0, 2], itertools.cycle(range(3))):
        if (delta := next(streams[number], None)) is not None:
            received[number].append(delta)
        if len(received[0]) == 4:
            assert runtime.generate([[1]], GREEDY)[0].outputs[0].token_ids == right[1]
        if all(deltas and deltas[-1].finish_reason for deltas in received):
            break
    assert [tokens_of(deltas) for deltas in received] == right


def test_a_bad_prompt_is_refused_when_the_stream_is_asked_for(runtime):
    with pytest.raises(RequestError, match="outside the vocabulary"):
        runtime.stream([320])


def test_a_stream_that_is_never_read_takes_nothing(runtime, is_idle):
    streams = [runtime.stream([5], GREEDY) for _ in range(3)]
    is_idle(runtime)
    streams[0].close()
    del streams
    is_idle(runtime)
    assert runtime.stats()["requests"]["finished"] == 0


@pytest.mark.parametrize("end", ["close", "drop", "throw"])
def test_a_half_read_stream_gives_its_blocks_back(runtime, is_idle, end):
    stream = runtime.stream([5] * 40, GREEDY)
    next(stream)
    assert runtime.stats()["blocks"]["used"] > 0
    if end == "close":
        stream.close()
    elif end == "throw":
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt)
    del stream
    is_idle(runtime)
    assert runtime.generate([[5]], GREEDY)[0].outputs[0].finish_reason == "length"


def test_a_stream_collected_in_the_middle_of_a_step_is_aborted_after_it(runtime, is_idle, monkeypatch):
    """A stream in a cycle dies whenever the collector runs, even while its own engine plans a step."""
    right = runtime.generate([[7]], GREEDY)[0].outputs[0].token_ids
    stream = runtime.stream([5], GREEDY)
    next(stream)
    cycle = [stream]
    cycle.append(cycle)
    del stream, cycle
    execute, used = ModelRunner.execute, []

    def collect(self, plan):
        if not used:
            assert plan.num_rows == 2
            gc.collect()
            used.append(runtime.stats()["blocks"]["used"])
            used.append(runtime.stats()["blocks"]["used"])
        return execute(self, plan)

    gc.disable()
    try:
        monkeypatch.setattr(ModelRunner, "execute", collect)
        assert runtime.generate([[7]], GREEDY)[0].outputs[0].token_ids == right
    finally:
        gc.enable()
    assert used == [2, 2], "nothing is taken away from a step that runs"
    is_idle(runtime)
