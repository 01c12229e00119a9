"""Masks of grammars: of several positions as one by one, the same wherever a request stood in between."""

import itertools
import math
import random
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.common.errors import RequestError
from lamina.runtime.protocol.scheduler_output import Constrained
from lamina.runtime.structured_output.compiler import GrammarCompiler
from lamina.runtime.structured_output.grammar import grammar_of
from lamina.runtime.structured_outputs import StructuredOutputs
from lamina.runtime.worker import grammar_masks
from lamina.runtime.worker.grammar_masks import GrammarMasks
from lamina.runtime.worker.grammar_walk import GrammarWalk

from ..every_line import happening, raising, traced

pytest.importorskip("llguidance")
PARTS = st.sampled_from(
    ["once upon", "[ab]", "a{1,3}", "(x|xyz)", "é", "(once|only)", "1+", "the end", "😀'the"]
)
REGEXES = st.lists(PARTS, min_size=1, max_size=5).map("".join)
SCHEMA = {
    "type": "object",
    "properties": {"long name": {"const": "once upon a time"}, "b": {"enum": ["one", "only", 12]}},
    "required": ["long name", "b"],
    "additionalProperties": False,
}


UNIQUE = {"type": "array", "uniqueItems": True, "items": {"enum": ["one", "only", "one of", 1, 12, True]}}
SCHEMAS = {"": SCHEMA, "unique": UNIQUE}
FORMS = st.sampled_from([*SCHEMAS]) | REGEXES


@pytest.fixture(scope="module", params=["bytes", "words"])
def compiler(request, bbpe_tokenizer):
    """For a tokenizer of bytes, and for one of words beside them: texts have several tokenizations."""
    tokenizer = bbpe_tokenizer()
    if request.param == "words":
        words = ["on", "ce", " up", "the", "end", "xy", "xyz", '"b', '":', '{"', "na", "me", "a a", "aa"]
        tokenizer = trained(words)
    text = tokenizer.backend_tokenizer.to_str()
    eos = tokenizer.eos_token_id
    return GrammarCompiler(lambda: text, num_valid_ids=len(tokenizer), eos_token_ids=[eos])


def trained(words):
    """A byte-level BPE tokenizer with merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [" ".join(words) * 3, '{"long name":"once upon a time","b":"only"}'], trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def ids_of(mask):
    return np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()


def width(compiler):
    return -(-compiler._num_valid_ids // 32)


def one_by_one(compiler, grammar, choose, most=60):
    """An answer that is drawn a token at a time, and the ids that each position may have."""
    walk, tokens, allowed = GrammarWalk(compiler.matcher(grammar)), [], []
    while len(tokens) < most:
        assert walk.move(len(tokens), lambda count: tokens[-count:])
        mask = np.zeros(width(compiler), np.int32)
        walk.write_mask(len(tokens), mask)
        allowed.append(ids_of(mask))
        tokens.append(choose(allowed[-1]))
        if tokens[-1] in compiler._eos_token_ids:
            break
    return tokens, allowed


def form(regex):
    if regex not in SCHEMAS:
        return grammar_of(StructuredOutputs(regex=regex))
    return grammar_of(StructuredOutputs(json=SCHEMAS[regex], compact=True))


@given(regex=FORMS, seed=st.integers(0, 99))
def test_masks_are_those_of_the_grammar_and_a_forced_token_is_the_only_one(compiler, regex, seed):
    grammar = form(regex)
    tokens, allowed = one_by_one(compiler, grammar, random.Random(seed).choice)
    plain = compiler.matcher(grammar)
    for token, own in zip(tokens, allowed, strict=True):
        mask = np.frombuffer(plain.compute_bitmask(), np.int32)
        assert set(own) <= set(ids_of(mask)) or len(own) == 1
        assert plain.validate_tokens([token]) == 1 or token in compiler._eos_token_ids
        plain.consume_token(token)


@given(
    regex=FORMS,
    seed=st.integers(0, 99),
    moves=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 6), st.integers(0, 9)), max_size=8),
)
def test_masks_of_drafts_are_those_one_by_one_wherever_the_request_stood_before(compiler, regex, seed, moves):
    """Drafts are the answer's own tokens, of which one may be any other; then all of them are taken back.

    Next it stands anywhere but behind a draft that was wrong, where no answer can be without it.
    """
    grammar, lots = form(regex), random.Random(seed)
    tokens, allowed = one_by_one(compiler, grammar, lots.choice)
    walk, num_positions = GrammarWalk(compiler.matcher(grammar)), len(tokens)
    for position, num_drafts, wrong in moves:
        position %= num_positions
        assert walk.move(position, lambda count, end=position: tokens[end - count : end])
        drafts = tokens[position : position + num_drafts]
        if wrong < len(drafts):
            drafts[wrong] = lots.choice([-1, 10**6, *range(compiler._num_valid_ids)])
        is_right = drafts == tokens[position : position + num_drafts]
        num_positions = len(tokens) if is_right else min(len(tokens), position + wrong + 2)
        masks = np.full((1 + len(drafts), width(compiler)), -1, np.int32)
        walk.look_at(position, drafts, masks)
        for place, mask in enumerate(masks):
            if drafts[:place] == tokens[position : position + place]:
                after_end = position + place == len(tokens)
                assert ids_of(mask) == (tokens[-1:] if after_end else allowed[position + place])
            if any(token < 0 or token >= compiler._num_valid_ids for token in drafts[:place]):
                assert (mask == -1).all(), "what comes after a draft that cannot be is left alone"


@given(regex=FORMS, seed=st.integers(0, 99), steps=st.lists(st.tuples(st.integers(0, 5), st.booleans())))
def test_drafts_that_held_need_not_be_said_again(compiler, regex, seed, steps):
    """As the step after them computes the newest token alone."""
    grammar = form(regex)
    tokens, allowed = one_by_one(compiler, grammar, random.Random(seed).choice)
    walk, position, lots = GrammarWalk(compiler.matcher(grammar)), 0, random.Random(seed)
    for num_drafts, _ in steps:
        drafts = tokens[position : position + num_drafts]
        masks = np.full((1 + len(drafts), width(compiler)), -1, np.int32)
        walk.look_at(position, drafts, masks)
        assert ids_of(masks[0]) == allowed[position]
        position += 1 + lots.randint(0, len(drafts))
        if position >= len(tokens):
            break

        def newest(count, end=position):
            assert count <= 1, "a token that was a draft is asked for"
            return tokens[end - count : end]

        assert walk.move(position, newest)


class Rows:
    """Constrained samples of one step, each at its own place of its own answer."""

    def __init__(self, compiler, grammars, jump_forward=True):
        self.masks = GrammarMasks(compiler.matcher, jump_forward=jump_forward, num_threads=3)
        self.words = width(compiler)
        for number, grammar in enumerate(grammars):
            self.masks.add(str(number), grammar)

    def restrict(self, tokens, drafts=None, banned=None):
        """The bits left of each sample, the samples of a row one after another, and what failed."""
        drafts = drafts or [()] * len(tokens)
        firsts = np.cumsum([0] + [1 + len(own) for own in drafts]).tolist()
        constrained = [
            Constrained(first, number, str(number), len(own), True, tuple(draft))
            for number, (first, own, draft) in enumerate(zip(firsts, tokens, drafts, strict=False))
        ]
        bits = np.full((firsts[-1], self.words), 0x5A5A5A5A, np.int32)  # what is there counts for nothing
        newest = lambda one, count: tokens[one.row][-count:]  # noqa: E731
        failures = self.masks.restrict(bits, constrained, newest, banned or {})
        return [ids_of(row) for row in bits], failures


@pytest.fixture
def rows(compiler):
    made = []

    def make(grammars, **settings):
        made.append(Rows(compiler, grammars, **settings))
        return made[-1]

    yield make
    for each in made:
        each.masks.close()


@pytest.mark.parametrize("worth", [math.inf, -1], ids=["at once", "beside"])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_rows_with_drafts_and_without_have_their_own_masks_in_one_step(
    compiler, rows, count, worth, monkeypatch
):
    monkeypatch.setattr(grammar_masks, "WORTH_A_THREAD", worth)
    monkeypatch.setattr(grammar_masks, "ROWS_OF_A_LEXER", 1)
    grammars = [form(regex) for regex in ("[ab]{2,9}", "x+y", "unique", "")] * 3
    answers = [one_by_one(compiler, grammar, random.Random(7).choice) for grammar in grammars[:count]]
    step = rows(grammars[:count])
    drafts = [tokens[:-1][: number % 3] for number, (tokens, _) in enumerate(answers)]
    found, failures = step.restrict([[]] * count, drafts)
    wanted = [
        allowed[place]
        for (_, allowed), own in zip(answers, drafts, strict=True)
        for place in range(1 + len(own))
    ]
    assert (found, failures) == (wanted, {})


def test_a_row_with_nothing_left_fails_at_its_own_sample_and_later_ones_have_no_bit(compiler, rows):
    step = rows([form("aab")])
    (first,), _ = step.restrict([[]])
    found, failures = step.restrict([[]], [first], banned={1: range(compiler._num_valid_ids)})
    assert (found[0], found[1]) == (first, [])
    assert failures["0"].num_drafts == 1, "a draft before it may not hold"
    found, failures = step.restrict([[]], banned={0: range(compiler._num_valid_ids)})
    assert found[0], "a sample that fails keeps a bit"
    assert failures["0"].num_drafts == 0
    assert isinstance(failures["0"].error, RequestError)


def test_a_sample_that_is_held_leaves_who_has_its_id_later_alone(compiler, rows):
    step = rows([form("[ab]{2,9}")])
    one, bits = Constrained(0, 0, "0", 0), np.zeros((1, width(compiler)), np.int32)
    step.restrict([[]])
    held = step.masks.held([one._replace(num_output=1)])
    step.masks.add("0", form("x+y"))
    (first, *_), _ = one_by_one(compiler, form("[ab]{2,9}"), min)
    assert step.masks.finish(step.masks.begin(bits, held, lambda _, count: [first] * count), {}) == {}
    (own,), failures = step.restrict([[]])
    _, allowed = one_by_one(compiler, form("x+y"), min)
    assert (own, failures) == (allowed[0], {})


def test_a_sample_whose_request_is_gone_is_as_free_as_its_parameters(compiler, rows):
    step = rows([form("[ab]{2,9}"), form("x+y")])
    bits, limit = np.zeros((2, width(compiler)), np.int32), np.full(width(compiler), 5, np.int32)
    step.masks.remove("0")
    held = step.masks.held([Constrained(which, which, str(which), 0) for which in range(2)])
    failures = step.masks.finish(step.masks.begin(bits, held, pytest.fail, {0: limit}), {})
    _, allowed = one_by_one(compiler, form("x+y"), min)
    assert (ids_of(bits[0]), ids_of(bits[1]), failures) == (ids_of(limit), allowed[0], {})


class Limited:
    """A matcher that cannot go on after one token, as one that a draft takes beyond its limits."""

    def __init__(self, matcher, limit):
        self._matcher, self._limit, self._is_error = matcher, limit, False

    def __getattr__(self, name):
        return getattr(self._matcher, name)

    def consume_token(self, token):
        self._is_error |= token == self._limit
        return self._matcher.consume_token(token)

    def is_error(self):
        return self._is_error

    def get_error(self):
        return "too many states"


def test_a_matcher_that_cannot_follow_a_draft_fails_where_that_holds_alone(compiler, rows):
    grammar = form("[ab][xy][ab]{3}")
    tokens, allowed = one_by_one(compiler, grammar, max)
    others, _ = one_by_one(compiler, grammar, min)
    step, plain = rows([grammar]), compiler.matcher
    step.masks._new_matcher = lambda *lexer: Limited(plain(*lexer), tokens[1])
    step.masks.add("0", grammar)
    found, failures = step.restrict([[]], [tokens[:3]])
    assert found[:3] == [allowed[0], allowed[1], []]
    assert failures["0"].num_drafts == 2
    assert "too many states" in str(failures["0"].error)
    for own in (tokens[:1], [*tokens[:1], others[1]]):  # of which the last is no draft that held
        found, failures = step.restrict([own])
        assert (found, failures) == ([allowed[len(own)]], {})


def test_what_follows_is_said_once_and_only_of_those_that_may_jump(compiler, rows):
    grammar = form("[ab]once upon a[cd]")
    tokens, allowed = one_by_one(compiler, grammar, min)
    step, still = rows([grammar]), rows([grammar], jump_forward=False)
    for own in (step, still):
        own.restrict([[]])
    one = Constrained(0, 0, "0", 0, True)
    (run,) = step.masks.forced([one], [tokens[0]]).values()
    count = next(place for place, ids in enumerate(allowed[1:]) if len(ids) > 1)
    assert list(run) == tokens[1 : 1 + count]
    assert step.masks.forced([one._replace(may_jump=False)], [tokens[0]]) == {}
    assert still.masks.forced([one], [tokens[0]]) == {}
    assert step.masks.forced([one], [-1]) == {"0": run}, "as it stands there already"
    assert step.restrict([tokens[: 1 + count]])[0] == [allowed[1 + count]]
    assert step.masks.forced([one._replace(request_id="gone")], [tokens[0]]) == {}


def test_the_end_is_forced_where_nothing_else_can_come_and_there_is_one_end(compiler, rows):
    step = rows([form("[ab]")])
    (first,), _ = step.restrict([[]])
    assert step.masks.forced([Constrained(0, 0, "0", 0, True)], [first[0]]) == {
        "0": tuple(compiler._eos_token_ids)
    }


def test_with_several_ends_the_model_has_the_choice(bbpe_tokenizer):
    tokenizer = bbpe_tokenizer()
    text, ends = tokenizer.backend_tokenizer.to_str(), [tokenizer.eos_token_id, 5]
    compiler = GrammarCompiler(lambda: text, num_valid_ids=len(tokenizer), eos_token_ids=ends)
    walk = GrammarWalk(compiler.matcher(form("ab")))
    assert walk.token_at(1) is not None
    assert walk.token_at(2) is None
    mask = np.zeros(width(compiler), np.int32)
    walk.move(2, lambda _: pytest.fail("it is known"))
    walk.write_mask(2, mask)
    assert ids_of(mask) == sorted(ends)


def test_a_step_after_the_end_that_was_undone_leaves_the_request_where_it_stood(compiler):
    """The end of a matcher that has stopped is one that it does not count."""
    tokens, allowed = one_by_one(compiler, form("[ab]once"), min)
    walk = GrammarWalk(compiler.matcher(form("[ab]once")))
    for position in (*range(len(tokens) + 2), 1, 0, len(tokens) - 1):
        known = [*tokens, tokens[-1], tokens[-1]]
        assert walk.move(position, lambda count, end=position, all_=known: all_[end - count : end])
        mask = np.zeros(width(compiler), np.int32)
        walk.write_mask(position, mask)
        assert ids_of(mask) == allowed[min(position, len(tokens) - 1)]


def test_a_broken_token_is_no_place_to_stand(compiler):
    walk = GrammarWalk(compiler.matcher(form("[ab]{3}")))
    assert not walk.move(1, lambda _: (-1,))
    assert walk.move(0, partial(pytest.fail, "nothing is missing"))


def test_a_constant_is_looked_at_once_however_long_it_is(compiler):
    """Counted by what the matcher is asked: each question would tokenize all that is left."""
    plain = compiler.matcher(grammar_of(StructuredOutputs(choice=["once upon a time " * 500])))
    asked = []
    matcher = SimpleNamespace(
        **{
            name: getattr(plain, name)
            for name in ("is_stopped", "is_error", "compute_bitmask", "consume_tokens")
        },
        compute_ff_tokens=lambda: asked.append(1) or plain.compute_ff_tokens(),
    )
    walk, position = GrammarWalk(matcher), 0
    while walk.token_at(position) is not None:
        assert walk.move(position, lambda _: pytest.fail("it is known"))
        position += 1
    assert position > 1000
    assert len(asked) <= 2


@pytest.mark.parametrize("regex", ["[ab]once upon[cd]{2}x", "", "unique", "a{1,3}"])
def test_an_interrupt_at_any_line_of_a_move_leaves_what_follows_as_it_is(compiler, regex):
    """Moves forward, back and within a run, each once interrupted and then asked for again."""
    tokens, allowed = one_by_one(compiler, form(regex), random.Random(5).choice)
    places = [*range(len(tokens)), 1, len(tokens) // 2, 0, len(tokens) // 2]
    matcher = compiler.matcher(form(regex))

    def walked(walk, place):
        masks = []
        for number, position in enumerate(places):
            act = partial(walk.move, position, lambda count, end=position: tokens[end - count : end])
            if number == place[0]:
                with traced(happening(raising(KeyboardInterrupt), place[1])):
                    place[1:] = [None]  # no line of it is left
                    with suppress(KeyboardInterrupt):
                        act()
                        place[1:] = ["past"]
            assert act()
            masks.append(np.zeros(width(compiler), np.int32))
            walk.write_mask(position, masks[-1])
        return [ids_of(mask) for mask in masks]

    wanted = [allowed[position] for position in places]
    for number in range(len(places)):
        for line in itertools.count(1):
            place = [number, line]
            assert walked(GrammarWalk(matcher.deep_copy()), place) == wanted
            if place[1] == "past":
                break
        assert line > 3
