"""Steps whose samples wait for masks: the tokens of steps that do not, whatever happens in between."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import Runtime, SamplingParams, StructuredOutputs
from lamina.runtime.startup import builder, engine_builder
from lamina.runtime.worker import grammar_masks
from lamina.runtime.worker.grammar_masks import GrammarMasks
from lamina.runtime.worker.launched_step import LaunchedStep
from lamina.runtime.worker.mask_thread import CheaperWay

from ..every_line import count, happening, raising, traced

pytest.importorskip("llguidance")
SMALL = {
    "dtype": "float32",
    "compile": False,
    "block_size": 4,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": [1, 2]}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
FORMS = [
    None,
    StructuredOutputs(json=PERSON, compact=True),
    StructuredOutputs(regex="[ab]{3}once upon[0-9]{1,9}"),
    StructuredOutputs(regex="[a-z]{30}"),
    StructuredOutputs(json={"type": "array", "uniqueItems": True, "items": {"enum": ["one", "only", 1, 12]}}),
]
PROMPTS = ["Once", "upon a time", "there was", "a"]


@pytest.fixture(scope="module")
def plain(tiny_text_folder):
    """Steps one after another, with masks by who steps."""
    with Runtime.from_pretrained(tiny_text_folder, **SMALL, num_kv_blocks=128) as runtime:
        yield runtime


@pytest.fixture(scope="module", params=["a GPU that is done", "a GPU at work"])
def overlapped(tiny_text_folder, request):
    """Two steps in flight as on a GPU, masks by threads; few blocks, so that requests are preempted.

    Where the GPU is at work, tokens are there for the next step once the step is read.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(engine_builder.DEPTHS, "cpu", 2)
        patch.setattr(builder, "_num_mask_threads", lambda device: 3)
        patch.setattr(grammar_masks, "WORTH_A_THREAD", -1)
        patch.setattr(grammar_masks, "ROWS_OF_A_LEXER", 1)
        patch.setattr(CheaperWay, "is_thread", lambda way: True)
        if request.param == "a GPU at work":
            patch.setattr(LaunchedStep, "is_done", property(lambda step: False))
        with Runtime.from_pretrained(tiny_text_folder, **SMALL, num_kv_blocks=40) as runtime:
            yield runtime


@st.composite
def asked(draw):
    """Parameters of a request."""
    form = draw(st.sampled_from(FORMS))
    return SamplingParams(
        structured_outputs=form,
        max_tokens=draw(st.integers(1, 24)),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 9)),
        ignore_eos=form is None,
        logprobs=draw(st.sampled_from([None, None, 2])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5])),
        stop=draw(st.sampled_from([None, None, ["b", "4"]])),
    )


def answer_of(deltas):
    return tuple(token for delta in deltas for token in delta.token_ids)


@given(
    requests=st.lists(
        st.tuples(st.sampled_from(PROMPTS), asked(), st.integers(0, 50)), min_size=1, max_size=6
    )
)
def test_tokens_are_those_of_steps_that_wait_in_any_mixture_and_whoever_leaves(
    plain, overlapped, is_idle, requests
):
    """Each stream is given up after so many deltas, or read to its end."""
    with contextlib.ExitStack() as streams:
        opened = []
        for prompt, params, most in requests:
            stream = streams.enter_context(contextlib.closing(overlapped.stream(prompt, params)))
            opened.append((stream, [next(stream)], most))
        while sum(len(deltas) < most and next_into(stream, deltas) for stream, deltas, most in opened):
            pass
    is_idle(overlapped)
    assert not overlapped._loaded.runner._adjuster.grammars._walks
    for (prompt, params, most), (_, deltas, _) in zip(requests, opened, strict=True):
        whole = answer_of(plain.stream(prompt, params))
        got = answer_of(deltas)
        assert got == (whole[: len(got)] if most <= len(deltas) else whole)


def next_into(stream, deltas):
    """Whether there was another."""
    found = next(stream, None)
    if found is not None:
        deltas.append(found)
    return found is not None


CONSTRAINED = [SamplingParams(structured_outputs=form, max_tokens=12, seed=3) for form in FORMS[1:]]


@pytest.fixture(scope="module")
def right(plain):
    return [answer_of(plain.stream(prompt, own)) for prompt, own in zip(PROMPTS, CONSTRAINED, strict=True)]


@pytest.fixture(scope="module")
def num_lines(overlapped):
    return count(lambda: overlapped.generate(PROMPTS, CONSTRAINED))


@given(place=st.floats(0, 1))
def test_an_interrupt_at_any_line_changes_no_other_answer(overlapped, right, num_lines, is_idle, place):
    bystander = overlapped.stream(PROMPTS[2], CONSTRAINED[2])
    received = [next(bystander)]
    hit = happening(raising(KeyboardInterrupt), 1 + int(place * num_lines))
    with contextlib.suppress(KeyboardInterrupt), traced(hit):
        overlapped.generate(PROMPTS, CONSTRAINED)
    received += bystander
    assert answer_of(received) == right[2]
    is_idle(overlapped)
    again = overlapped.generate(PROMPTS, CONSTRAINED)
    assert [output.outputs[0].token_ids for output in again] == right


@pytest.mark.parametrize("part", ["begin", "finish"])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_masks_that_fail_once_are_made_again(overlapped, right, is_idle, said, monkeypatch, part, step):
    original, calls = getattr(GrammarMasks, part), []

    def fail_once(self, *arguments):
        calls.append(None)
        if len(calls) == step:
            raise MemoryError("of a matcher")
        return original(self, *arguments)

    monkeypatch.setattr(GrammarMasks, part, fail_once)
    found = overlapped.generate(PROMPTS, CONSTRAINED)
    assert [output.outputs[0].token_ids for output in found] == right
    assert len(calls) > step
    assert "a step failed at no request in particular, and is tried again: MemoryError" in said()[-1]
    is_idle(overlapped)
