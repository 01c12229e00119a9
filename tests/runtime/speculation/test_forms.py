"""Answers with a form are those without drafts, whatever is asked, amid jumps and preemption too."""

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import Draft, Eagle, NGram, RequestError, Runtime, SamplingParams, StructuredOutputs
from lamina.runtime.startup import engine_builder

from ...heads import RandomHead
from ..test_jump_forward import NARROW, REQUESTS, answers, came_to, params_of
from ..test_jump_forward import SETTINGS as WIDE
from .drafting import SCRIPTS, Scripted, use

pytest.importorskip("llguidance")
KINDS = {  # by name: depth, drafts, settings
    "depth 1": (1, 3, {}),
    "depth 2": (2, 3, {}),
    "narrow, depth 1": (1, 2, NARROW),
    "narrow, depth 3": (3, 7, NARROW | {"prefix_cache": False}),
    "no jumps, depth 2": (2, 3, {"jump_forward": False}),
}


@pytest.fixture(scope="module")
def plain(tiny_text_folder):
    with Runtime.from_pretrained(tiny_text_folder, jump_forward=False, **WIDE) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def drafting(tiny_text_folder):
    """By name a runtime, and the drafter of it alone."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        opened = {}
        for name, (depth, k, settings) in KINDS.items():
            drafter = Scripted(SCRIPTS["right"])
            use(patch, drafter, depth=depth)
            made = Runtime.from_pretrained(tiny_text_folder, speculative=NGram(k=k), **WIDE | settings)
            opened[name] = stack.enter_context(made), drafter
        yield opened


@pytest.fixture(autouse=True)
def nothing_left(drafting, is_idle):
    yield
    for runtime, _ in drafting.values():
        is_idle(runtime)
        assert not runtime._loaded.runner._adjuster.grammars._walks


def alone(plain, requests):
    """What each request comes to by itself, and prompts with all that comes after them."""
    found, known = [], {}
    for number, (place, form, own) in enumerate(requests):
        try:
            (output,) = plain.generate(f"prompt {place} " * (1 + place), params_of(form, own))
        except RequestError as error:
            found.append(str(error))
            continue
        found.append(came_to(output))
        for one in output.outputs:
            known[number, one.index] = (*output.prompt_token_ids, *one.token_ids)
    return found, known


def counts_of(runtime):
    return runtime.stats()["speculation"]


@given(requests=st.lists(REQUESTS, min_size=1, max_size=4), script=st.sampled_from([*SCRIPTS]))
def test_drafts_change_no_answer_with_a_form(plain, drafting, requests, script):
    wanted, known = alone(plain, requests)
    for name, (runtime, drafter) in drafting.items():
        drafter.script, drafter.answers = SCRIPTS[script], known
        assert answers(runtime, requests) == wanted, name


@pytest.mark.parametrize("name", KINDS)
def test_drafts_that_a_form_allows_hold_and_others_do_not(plain, drafting, name):
    """Of a row with a form alone in its batch, so that what is counted are its drafts."""
    (runtime, drafter), form = drafting[name], StructuredOutputs(regex="[a-z]{30}")
    params = SamplingParams(structured_outputs=form, max_tokens=40, temperature=1.0, seed=3)
    (wanted,) = plain.generate("Once", params)
    drafter.answers = {0: (*wanted.prompt_token_ids, *wanted.outputs[0].token_ids)}
    for script, holds in (("right", True), ("wrong", False)):
        drafter.script, before = SCRIPTS[script], counts_of(runtime)
        assert came_to(runtime.generate("Once", params)[0]) == came_to(wanted)
        after = counts_of(runtime)
        assert after["draft_tokens"] > before["draft_tokens"]
        assert (after["accepted_tokens"] > before["accepted_tokens"]) is holds


@pytest.mark.parametrize("name", ["depth 1", "depth 2", "narrow, depth 3"])
def test_long_constants_are_jumped_over_amid_drafts(plain, drafting, name):
    form = StructuredOutputs(regex="[a-z]{12}once upon a time, the end of it, a key, 0[a-z]{12}")
    runtime, drafter = drafting[name]
    params = SamplingParams(structured_outputs=form, max_tokens=90, temperature=1.0, seed=4)
    (wanted,) = plain.generate("Once", params)
    drafter.script = SCRIPTS["right"]
    drafter.answers = {0: (*wanted.prompt_token_ids, *wanted.outputs[0].token_ids)}
    forced, held = runtime.stats()["forced_tokens"], counts_of(runtime)["accepted_tokens"]
    assert came_to(runtime.generate("Once", params)[0]) == came_to(wanted)
    assert runtime.stats()["forced_tokens"] > forced
    assert counts_of(runtime)["accepted_tokens"] > held


@pytest.mark.parametrize("name", KINDS)
def test_a_form_that_others_leave_nothing_of_ends_where_it_does_without_drafts(plain, drafting, name):
    """After drafts that hold, where they are right; they are those of a wider choice of ids."""
    (runtime, drafter), form = drafting[name], StructuredOutputs(regex="[ab]{9}c")
    ids = sorted({*plain.tokenizer.encode("ab")})
    params = SamplingParams(structured_outputs=form, max_tokens=20, temperature=0, allowed_token_ids=ids)
    (wider,) = plain.generate("Once", SamplingParams(structured_outputs=form, max_tokens=20, temperature=0))
    with pytest.raises(RequestError) as wanted:
        plain.generate("Once", params)
    drafter.script = SCRIPTS["right"]
    drafter.answers = {0: (*wider.prompt_token_ids, *wider.outputs[0].token_ids)}
    with pytest.raises(RequestError) as found:
        runtime.generate("Once", params)
    assert str(found.value) == str(wanted.value)
    assert "structured_outputs" in str(wanted.value)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["ngram", "draft", "eagle"])
def test_real_drafters_change_no_answer(plain, tiny_text_folder, tmp_path, monkeypatch, kind, depth):
    """A twin of the model draws what that draws where its form leaves it; a random head seldom does."""
    sums = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    drafters = {
        "ngram": lambda: NGram(k=3, min_ngram=1),
        "draft": lambda: Draft(model=tiny_text_folder, k=3),
        "eagle": lambda: Eagle(model=RandomHead(is_third=True, changes=sums).save(tmp_path), k=3),
    }
    forms = [{"regex": r"[\x20-~]{40}"}, {"regex": "(abc){2}[de]{9}once upon a time[0-9]{9}"}, None]
    requests = [
        (number, forms[number % 3], {"temperature": 0.5 * (number % 2), "seed": number, "max_tokens": 40})
        for number in range(6)
    ]
    wanted, _ = alone(plain, requests)
    monkeypatch.setitem(engine_builder.DEPTHS, "cpu", depth)
    with Runtime.from_pretrained(tiny_text_folder, speculative=drafters[kind](), **WIDE) as runtime:
        assert answers(runtime, requests) == wanted
        assert counts_of(runtime)["draft_tokens"] > 0
        before = counts_of(runtime)["accepted_tokens"]
        assert answers(runtime, requests[:1]) == wanted[:1]
        assert (counts_of(runtime)["accepted_tokens"] > before) or kind != "draft"
