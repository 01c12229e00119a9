"""Tokens that a form forces: the same answer in fewer steps, whatever else is asked."""

import json
import re
from contextlib import ExitStack
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import ConfigError, RequestError, Runtime, SamplingParams, StructuredOutputs
from lamina.runtime.scheduler.replay import replay
from lamina.runtime.startup import engine_builder

pytest.importorskip("llguidance")
SETTINGS = {"dtype": "float64", "compile": False, "num_kv_blocks": 256, "max_num_seqs": 8}
NARROW = {"num_kv_blocks": 40, "block_size": 4, "max_num_batched_tokens": 16, "prefill_chunk": 7}

WORDS = st.sampled_from(["once upon", "a", "the end of it", "é😀", "key", "0"])
TEXTS = st.lists(WORDS, min_size=1, max_size=3).map(" ".join)
LEAVES = st.one_of(
    TEXTS.map(lambda text: {"const": text}),
    st.lists(TEXTS, min_size=2, max_size=3, unique=True).map(lambda texts: {"enum": texts}),
    st.just({"type": "boolean"}),
    st.just({"type": "integer", "minimum": 0, "maximum": 120}),
    st.just({"type": "string", "maxLength": 3}),
    st.just({"type": "array", "uniqueItems": True, "items": {"enum": ["once upon", "once", 1, 12, True]}}),
)


def object_of(properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.dictionaries(TEXTS, inner, min_size=1, max_size=2).map(object_of),
    max_leaves=4,
)
PIECES = st.one_of(TEXTS, st.sampled_from(["[ab]", "(x|xyz)", "[0-9]{1,2}", "(once|only)"]))
FORMS = st.one_of(
    SCHEMAS.map(lambda schema: {"json": schema, "compact": True}),
    st.lists(PIECES, min_size=1, max_size=4).map(lambda pieces: {"regex": "".join(pieces)}),
    st.lists(TEXTS, min_size=1, max_size=3, unique=True).map(lambda texts: {"choice": texts}),
)
PARAMS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 50),
        "temperature": st.sampled_from([0.0, 1.0, 2.0]),
        "max_tokens": st.sampled_from([1, 2, 5, 17, 60]),
    },
    optional={
        "stop": st.sampled_from(["up", "e", " of it", '":', "é"]),
        "stop_token_ids": st.lists(st.integers(60, 90), min_size=1, max_size=2),
        "presence_penalty": st.just(1.0),
        "repetition_penalty": st.just(1.3),
        "logit_bias": st.just({70: 3.0, 80: -3.0}),
        "logprobs": st.integers(0, 2),
        "min_tokens": st.integers(0, 3),
        "n": st.integers(2, 3),
        "bad_words": st.just(["zz"]),
        "prompt_logprobs": st.just(0),
    },
)
REQUESTS = st.tuples(st.integers(0, 5), st.none() | FORMS, PARAMS)


def params_of(form, params):
    own = params | {"min_tokens": min(params.get("min_tokens", 0), params["max_tokens"])}
    return SamplingParams(structured_outputs=None if form is None else StructuredOutputs(**form), **own)


def came_to(output):
    """All that a caller can see of answers, less times; log-probabilities as rounded."""
    return [
        (answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, near(answer.logprobs))
        for answer in output.outputs
    ]


def near(logprobs):
    """Equal to what differs by rounding, as steps of other sizes add up in another order."""
    return None if logprobs is None else Near([next(iter(each.values())).logprob for each in logprobs])


class Near(list):
    def __eq__(self, other):
        return list(self) == pytest.approx(list(other), abs=1e-3)


def answers(runtime, requests):
    """What each request comes to, all of them at once; those that end in an error come to that."""
    prompts = [f"prompt {number} " * (1 + number) for number, _, _ in requests]
    params = [params_of(form, own) for _, form, own in requests]
    found = []
    try:
        return [came_to(output) for output in runtime.generate(prompts, params)]
    except RequestError:  # min_tokens that a form cannot have: which, is found one by one
        for prompt, own in zip(prompts, params, strict=True):
            try:
                found += [came_to(output) for output in runtime.generate(prompt, own)]
            except RequestError as error:
                found.append(str(error))
        return found


def num_steps(runtime):
    return runtime._loaded.core.scheduler._in_flight.num_launched


@pytest.fixture(scope="module")
def runtimes(tiny_text_folder):
    """By name: plain is without jumps, the others with, as deep and as narrow as they say."""
    with ExitStack() as stack:

        def opened(depth, **settings):
            with patch.dict(engine_builder.DEPTHS, cpu=depth):
                return stack.enter_context(Runtime.from_pretrained(tiny_text_folder, **SETTINGS | settings))

        yield {
            "plain": opened(1, jump_forward=False),
            "plain, depth 2": opened(2, jump_forward=False),
            "depth 1": opened(1),
            "depth 2": opened(2),
            "narrow, depth 1": opened(1, **NARROW),
            "narrow, depth 2": opened(2, **NARROW, prefix_cache=False),
        }


@pytest.fixture(autouse=True)
def nothing_left(runtimes, is_idle):
    yield
    for runtime in runtimes.values():
        is_idle(runtime)
        assert not runtime._loaded.runner._adjuster.grammars._walks


@given(requests=st.lists(REQUESTS, min_size=1, max_size=5))
def test_jumps_change_no_answer_alone_or_in_a_batch_at_any_depth_and_with_preemption(runtimes, requests):
    alone = [answers(runtimes["plain"], [request])[0] for request in requests]
    for name, runtime in runtimes.items():
        assert answers(runtime, requests) == alone, name


def test_the_property_has_seen_preemption_and_jumps(runtimes):
    form = {"choice": ["once upon a time there was the end of it " * 2 + end for end in ("a", "b")]}
    requests = [(number, form, {"max_tokens": 90, "seed": number, "temperature": 1.0}) for number in range(5)]
    wanted = answers(runtimes["plain"], requests)
    for name in ("narrow, depth 1", "narrow, depth 2"):
        before = runtimes[name].stats()
        assert answers(runtimes[name], requests) == wanted
        after = runtimes[name].stats()
        assert after["preemptions"] > before["preemptions"]
        assert after["forced_tokens"] > before["forced_tokens"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_constant_takes_a_few_steps_and_each_token_of_it_counts(runtimes, depth):
    runtime, plain = runtimes[f"depth {depth}"], runtimes["plain"]
    form = StructuredOutputs(
        json=object_of({"the key": {"const": "once upon a time"}, "b": {"type": "boolean"}}), compact=True
    )
    params = SamplingParams(structured_outputs=form, max_tokens=99, temperature=0.0)
    steps, forced = num_steps(runtime), runtime.stats()["forced_tokens"]
    (output,) = runtime.generate("Once", params)
    (wanted,) = plain.generate("Once", params)
    assert came_to(output) == came_to(wanted)
    num_tokens = len(output.outputs[0].token_ids)
    assert num_tokens > 30
    assert num_tokens - 8 < runtime.stats()["forced_tokens"] - forced < num_tokens
    assert num_steps(runtime) - steps <= 6
    assert plain.stats()["forced_tokens"] == 0


@pytest.mark.parametrize("name", ["depth 1", "depth 2"])
def test_a_stream_has_the_same_text_and_tokens(runtimes, name):
    form = StructuredOutputs(regex="[ab]once upon a time[cd]")
    params = SamplingParams(structured_outputs=form, max_tokens=99, temperature=1.0, seed=4)
    pieces = list(runtimes[name].stream("Once", params))
    (wanted,) = runtimes["plain"].generate("Once", params)
    assert "".join(piece.text for piece in pieces) == wanted.text
    assert [id_ for piece in pieces for id_ in piece.token_ids] == [*wanted.outputs[0].token_ids]


def test_what_others_may_leave_out_is_sampled(runtimes):
    runtime = runtimes["depth 2"]
    form = StructuredOutputs(choice=["once upon a time"])
    allowed = sorted({*runtime.tokenizer.encode("once upon a time")})
    for own in ({"logprobs": 0}, {"bad_words": ["zz"]}, {"allowed_token_ids": [2, *allowed]}):
        before = runtime.stats()["forced_tokens"]
        (output,) = runtime.generate("x", SamplingParams(structured_outputs=form, max_tokens=40, **own))
        assert output.text == "once upon a time"
        assert runtime.stats()["forced_tokens"] == before
        if "logprobs" in own:
            assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_decision_log_with_jumps_is_decided_again(tiny_text_folder, tmp_path, depth):
    path = tmp_path / "log.jsonl"
    forms = [
        {"choice": [f"once upon a time {n} there was" for n in "ab"]},
        None,
        {"regex": "[ab]the end"},
    ] * 3
    requests = [
        (n, form, {"max_tokens": 20 + n, "seed": n, "temperature": 1.0}) for n, form in enumerate(forms)
    ]
    with (
        patch.dict(engine_builder.DEPTHS, cpu=depth),
        Runtime.from_pretrained(tiny_text_folder, **SETTINGS | NARROW, record=path) as runtime,
    ):
        answers(runtime, requests)
        answers(runtime, requests)
        assert runtime.stats()["forced_tokens"] > 50
        hits = runtime.stats()["prefix_cache"]["hit_tokens"]
    result = replay(path)
    assert result.difference is None
    assert result.num_hit_tokens == hits
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    first = next(number for number, said in enumerate(lines) if said.get("forced"))
    lines[first]["forced"] = {name: count - 1 for name, count in lines[first]["forced"].items()}
    path.write_text("\n".join(map(json.dumps, lines)))
    assert replay(path).difference is not None


def test_an_answer_given_up_within_a_run_leaves_nothing(runtimes):
    runtime = runtimes["depth 2"]
    form = StructuredOutputs(regex="[ab]once upon a time[cd]once upon a time[ef]")
    for count in (1, 2, 3):
        stream = runtime.stream("Once", SamplingParams(structured_outputs=form, max_tokens=99))
        for _ in range(count):
            next(stream)
        stream.close()


@pytest.mark.parametrize("value", [1, "yes", None])
def test_the_switch_is_a_flag(tiny_text_folder, value):
    with pytest.raises(ConfigError, match="jump_forward"):
        Runtime.from_pretrained(tiny_text_folder, jump_forward=value)


LONG = {"const": "".join(f"word {number} " for number in range(10_000))}


@pytest.mark.parametrize("name", ["depth 1", "depth 2", "narrow, depth 1", "narrow, depth 2"])
def test_a_constant_of_100_kb_is_bounded_by_tokens_asked_for_by_the_context_and_by_each_step(runtimes, name):
    runtime = runtimes[name]
    budget = runtime.stats()["resolved"]["max_num_batched_tokens"]
    for most in (10, None):
        steps = num_steps(runtime)
        params = SamplingParams(structured_outputs=StructuredOutputs(json=LONG), max_tokens=most)
        (output,) = runtime.generate("Once", params)
        (answer,) = output.outputs
        assert answer.finish_reason == "length"
        assert json.dumps(LONG["const"]).startswith(answer.text)
        assert len(answer.token_ids) == (most or len(answer.token_ids))
        assert num_steps(runtime) - steps <= 3, "all of it is known at once"
    beside = SamplingParams(max_tokens=30, seed=1, temperature=1.0)
    form = StructuredOutputs(choice=["once upon a time " * 3])
    held = SamplingParams(structured_outputs=form, max_tokens=90)
    alone = runtime.generate("Twice", beside)[0].outputs[0].token_ids
    widths = []
    with spied_plans(runtime, widths):
        free, _ = runtime.generate(["Twice", "Once"], [beside, held])
    assert free.outputs[0].token_ids == alone
    assert max(widths) <= budget


def spied_plans(runtime, widths):
    planner = runtime._loaded.core.scheduler._planner
    plan = planner.plan

    def noted(counts):
        widths.append(int(counts.sum()))
        return plan(counts)

    return patch.object(planner, "plan", noted)


@pytest.mark.parametrize(
    "form", [{"regex": "(|)"}, {"grammar": 'start: ""'}, {"grammar": 'start: a\na: ""'}], ids=str
)
def test_a_form_that_has_nothing_but_an_end_is_an_answer_of_it(runtimes, form):
    for runtime in runtimes.values():
        (output,) = runtime.generate("Once", SamplingParams(structured_outputs=StructuredOutputs(**form)))
        (answer,) = output.outputs
        assert (answer.text, len(answer.token_ids), answer.finish_reason) == ("", 1, "stop")


@pytest.mark.parametrize(
    "form",
    [
        {"regex": r"[^\s\S]"},
        {"json": {"enum": []}},
        {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
        {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
        {"grammar": 'start: a\na: "x" a'},
    ],
    ids=str,
)
def test_a_form_of_no_text_is_refused_or_ends_its_request_alone(runtimes, form):
    for name in ("plain", "depth 2"):
        with pytest.raises(RequestError, match=r"cannot be enforced|cannot go on"):
            runtimes[name].generate("Once", SamplingParams(structured_outputs=StructuredOutputs(**form)))


@pytest.fixture(scope="module")
def with_byte_fallback(make_tiny_folder, spm_tokenizer):
    """Without jumps and with, for a tokenizer that writes what it has no piece for as bytes."""
    settings = SETTINGS | {"tokenizer": spm_tokenizer()}
    folder = make_tiny_folder(vocab_size=320)
    with (
        Runtime.from_pretrained(folder, **settings, jump_forward=False) as plain,
        patch.dict(engine_builder.DEPTHS, cpu=2),
        Runtime.from_pretrained(folder, **settings) as jumping,
    ):
        yield plain, jumping


@pytest.mark.parametrize(
    "regex",
    ["hello world[.!]", " hello  world", "é日😀[é日😀]", '\\{"hello": "[wW]orld é"\\}', "(é|è)😀\n\t"],
)
def test_pieces_and_bytes_come_to_the_text_of_the_form(with_byte_fallback, regex):
    plain, jumping = with_byte_fallback
    for seed in range(4):
        form = StructuredOutputs(regex=regex)
        params = SamplingParams(structured_outputs=form, max_tokens=99, temperature=1.0, seed=seed)
        (wanted,), (found,) = (runtime.generate("hello", params) for runtime in (plain, jumping))
        assert came_to(found) == came_to(wanted)
        assert re.fullmatch(regex, found.text)
    assert jumping.stats()["forced_tokens"] > plain.stats()["forced_tokens"] == 0


def test_many_alike_beside_free_ones_are_what_they_are_alone(runtimes):
    """More of them than a step has rows, some of which jump in steps in which others do not."""
    form = {
        "json": object_of({"name": {"enum": ["once", "only"]}, "n": {"type": "boolean"}}),
        "compact": True,
    }
    own = [{"max_tokens": 40, "seed": number, "temperature": 1.0} for number in range(30)]
    requests = [(number % 3, form if number % 4 else None, each) for number, each in enumerate(own)]
    wanted = answers(runtimes["plain"], requests)
    for name in ("depth 2", "narrow, depth 2"):
        assert answers(runtimes[name], requests) == wanted
