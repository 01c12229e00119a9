"""Forms beside everything else that a request may ask for: each holds, or the request is refused by name."""

import json
import math
import re

import pytest

from lamina import BeamSearchParams, RequestError, Runtime, SamplingParams, StructuredOutputs
from lamina.common.errors import UnknownParameterError
from lamina.runtime.startup import engine_builder
from lamina.runtime.worker.grammar_masks import GrammarMasks
from lamina.runtime.worker.graph_runner import GraphRunner
from lamina.runtime.worker.launched_step import LaunchedStep
from lamina.runtime.worker.logits_adjuster import Adjuster

pytest.importorskip("llguidance")
SETTINGS = {"dtype": "float32", "compile": False, "num_kv_blocks": 256, "block_size": 4, "max_num_seqs": 16}
ONCE = StructuredOutputs(choice=["once upon a time"])
EITHER = StructuredOutputs(regex="[ab]{4}once upon a time[0-9]{4}")
JUMPS = pytest.mark.parametrize("jumps", [False, True], ids=["stepwise", "jumping"])


@pytest.fixture(scope="module")
def runtimes(tiny_text_folder):
    """Without jumps, and with."""
    with (
        Runtime.from_pretrained(tiny_text_folder, **SETTINGS, jump_forward=False) as stepwise,
        Runtime.from_pretrained(tiny_text_folder, **SETTINGS) as jumping,
    ):
        yield stepwise, jumping


@pytest.fixture
def ask(runtimes, is_idle):
    """ask(jumps, form, **parameters) -> the only answer."""

    def answer(jumps, form, prompt="Once", **own):
        params = SamplingParams(
            structured_outputs=form, **{"max_tokens": 60, "temperature": 1.0, "seed": 3} | own
        )
        (output,) = runtimes[jumps].generate(prompt, params)
        return output.outputs[0]

    yield answer
    for runtime in runtimes:
        is_idle(runtime)


@JUMPS
@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_cuts_a_form_where_it_comes_to_it(ask, jumps, included):
    answer = ask(jumps, ONCE, stop=["time", "upo"], include_stop_str_in_output=included)
    text = "once " + "upo" * included
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (text, "stop", "upo")
    assert len(answer.token_ids) == len("once upo")  # a byte each: what came after it counts for nothing


@JUMPS
def test_every_length_is_kept_to_within_what_is_forced(ask, runtimes, jumps):
    whole = ask(jumps, ONCE)
    assert (whole.text, whole.finish_reason) == ("once upon a time", "stop")
    for count in range(1, len(whole.token_ids)):
        answer = ask(jumps, ONCE, max_tokens=count)
        assert (answer.token_ids, answer.finish_reason) == (whole.token_ids[:count], "length")
        assert whole.text.startswith(answer.text)


@JUMPS
def test_an_id_that_stops_does_so_within_what_is_forced_or_may_not_come_yet(ask, jumps):
    u = ask(jumps, ONCE).token_ids[5]
    answer = ask(jumps, ONCE, stop_token_ids=[u])
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("once ", "stop", u)
    assert ask(jumps, ONCE, stop_token_ids=[u], min_tokens=5).text == "once "
    with pytest.raises(RequestError, match="leaves no token here that min_tokens"):
        ask(jumps, ONCE, stop_token_ids=[u], min_tokens=6)


@JUMPS
def test_min_tokens_as_long_as_the_form_is_kept_to_and_longer_ends_its_request(ask, jumps):
    count = len(ask(jumps, ONCE).token_ids)
    assert len(ask(jumps, ONCE, min_tokens=count - 1).token_ids) == count
    with pytest.raises(RequestError, match="leaves no token here that min_tokens"):
        ask(jumps, ONCE, min_tokens=count)
    assert len(ask(jumps, StructuredOutputs(regex="a{1,30}"), min_tokens=10).token_ids) > 10


@JUMPS
def test_biases_and_penalties_choose_among_what_the_form_leaves(ask, runtimes, jumps):
    a, b = (runtimes[0].tokenizer.encode(letter)[-1] for letter in "ab")
    likely = ask(jumps, EITHER, logit_bias={a: 50.0, b: -50.0}).text
    assert re.fullmatch("a{4}once upon a time[0-9]{4}", likely)
    against = dict.fromkeys(runtimes[0].tokenizer.encode("once upon a time"), -100.0)
    assert ask(jumps, ONCE, logit_bias=against).text == "once upon a time"
    penalties = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.9}
    answer = ask(jumps, EITHER, temperature=0.0, **penalties)
    assert re.fullmatch("[ab]{4}once upon a time[0-9]{4}", answer.text)
    assert len({*answer.text[-4:]}) == 4, "a digit that was there is the less likely"


def test_penalties_count_forced_tokens_as_any_others(ask):
    form = StructuredOutputs(regex="0123456789[0-9]{9}")
    for seed in range(5):
        own = {"frequency_penalty": 1.0, "seed": seed}
        assert ask(True, form, **own).token_ids == ask(False, form, **own).token_ids


@JUMPS
def test_words_that_a_request_excludes_and_its_form_needs_are_refused(ask, jumps):
    assert ask(jumps, ONCE, bad_words=["twice"]).text == "once upon a time"
    with pytest.raises(RequestError, match="only tokens that bad_words excludes"):
        ask(jumps, ONCE, bad_words=["upon"])
    with pytest.raises(RequestError, match="allowed_token_ids"):
        ask(jumps, ONCE, allowed_token_ids=[100, 101])


@JUMPS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_token_of_a_form_has_finite_log_probabilities(ask, jumps, temperature):
    answer = ask(jumps, EITHER, temperature=temperature, logprobs=3)
    assert len(answer.logprobs) == len(answer.token_ids)
    for token, own in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(own)) == token
        assert all(math.isfinite(each.logprob) and each.logprob <= 0 for each in own.values())
        assert own[token].rank >= 1
    json.dumps([[each.logprob for each in own.values()] for own in answer.logprobs], allow_nan=False)


@JUMPS
def test_each_of_n_answers_has_the_form_and_is_the_one_it_is_alone(runtimes, jumps):
    params = {"structured_outputs": EITHER, "temperature": 1.0, "max_tokens": 60}
    (output,) = runtimes[jumps].generate("Once", SamplingParams(**params, seed=3, n=4))
    (other,) = runtimes[not jumps].generate("Once", SamplingParams(**params, seed=3, n=4))
    texts = [answer.text for answer in output.outputs]
    assert all(re.fullmatch("[ab]{4}once upon a time[0-9]{4}", text) for text in texts)
    assert len({*texts}) > 1
    assert texts == [answer.text for answer in other.outputs]


@JUMPS
def test_a_prompt_that_goes_on_from_an_answer_hits_its_blocks_and_gets_the_same(runtimes, ask, jumps):
    """Blocks that forced tokens fill hold what those of a prompt do."""
    prompt = runtimes[0].tokenizer.encode(f"Once {jumps}")
    first = ask(jumps, EITHER, prompt=prompt)
    longer = [*prompt, *first.token_ids[:-1], *runtimes[0].tokenizer.encode(" and then")]
    params = SamplingParams(structured_outputs=EITHER, max_tokens=60, temperature=1.0, seed=8)
    (turn,) = runtimes[jumps].generate([longer], params)
    assert turn.num_cached_tokens > len(prompt) + 16
    (cold,) = runtimes[not jumps].generate([longer], params)
    assert cold.num_cached_tokens < len(prompt)
    assert turn.outputs[0].token_ids == cold.outputs[0].token_ids
    free = SamplingParams(max_tokens=10, temperature=0.0)
    (warm,), (new,) = (runtimes[which].generate([[*longer, 7]], free) for which in (jumps, not jumps))
    assert warm.outputs[0].token_ids == new.outputs[0].token_ids


def test_beam_search_has_no_form_and_says_so(runtimes):
    with pytest.raises(UnknownParameterError, match="structured_outputs"):
        BeamSearchParams(structured_outputs=ONCE)
    with pytest.raises(UnknownParameterError, match="structured_outputs"):
        runtimes[1].beam_search("x", BeamSearchParams(beam_width=2), structured_outputs=ONCE)
    with pytest.raises(RequestError, match="wanted a BeamSearchParams"):
        runtimes[1].beam_search("x", SamplingParams(structured_outputs=ONCE))


@JUMPS
def test_ignore_eos_is_refused_by_name(ask, jumps):
    with pytest.raises(RequestError, match="ignore_eos is True; wanted False with structured_outputs"):
        ask(jumps, ONCE, ignore_eos=True)


@JUMPS
def test_an_answer_that_is_given_up_anywhere_leaves_the_next_as_it_is(runtimes, ask, jumps):
    alone = ask(jumps, EITHER).token_ids
    params = SamplingParams(structured_outputs=EITHER, max_tokens=60, temperature=1.0, seed=3)
    for count in range(1, 12):
        stream = runtimes[jumps].stream("Once", params)
        got = [token for _ in range(count) if (piece := next(stream, None)) for token in piece.token_ids]
        stream.close()
        assert tuple(got) == alone[: len(got)]
        assert ask(jumps, EITHER).token_ids == alone


def test_masks_are_filled_while_the_step_runs_whose_samples_they_are_for(tiny_text_folder, monkeypatch):
    """With two steps in flight: the forward, then what the tokens before it end or begin, then the masks."""
    events = []

    def note(kind, name, event):
        method = getattr(kind, name)
        monkeypatch.setattr(
            kind, name, lambda self, *args, **named: (events.append(event), method(self, *args, **named))[1]
        )

    note(GraphRunner, "forward", "forward")
    note(LaunchedStep, "newest", "tokens")
    note(GrammarMasks, "_fill", "masks")
    note(Adjuster, "_adjusted_scores", "sample")
    note(LaunchedStep, "read", "read")
    monkeypatch.setitem(engine_builder.DEPTHS, "cpu", 2)
    with Runtime.from_pretrained(tiny_text_folder, **SETTINGS, jump_forward=False) as runtime:
        params = SamplingParams(structured_outputs=StructuredOutputs(regex="[ab]{6}"), max_tokens=5)
        runtime.generate(["Once", "upon", "a"], params)
    step = ["forward", "tokens", "read", "masks", "sample"]
    assert events[events.index("tokens") - 1 :] == [*step * 4, "read"]
