"""Masks by a thread or by who steps: which way a step goes, by what steps of about as many rows took."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.runtime.protocol.scheduler_output import Constrained
from lamina.runtime.structured_output.compiler import GrammarCompiler
from lamina.runtime.structured_output.grammar import grammar_of
from lamina.runtime.structured_outputs import StructuredOutputs
from lamina.runtime.worker import grammar_masks
from lamina.runtime.worker.grammar_masks import GrammarMasks
from lamina.runtime.worker.grammar_walk import GrammarWalk
from lamina.runtime.worker.mask_thread import MaskThread

pytest.importorskip("llguidance")
MANY = 16


@pytest.fixture
def masks(bbpe_tokenizer, monkeypatch):
    """Of MANY rows; a mask takes a second, and to wake the thread five, whatever it makes."""
    tokenizer = bbpe_tokenizer()
    text = tokenizer.backend_tokenizer.to_str()
    compiler = GrammarCompiler(
        lambda: text, num_valid_ids=len(tokenizer), eos_token_ids=[tokenizer.eos_token_id]
    )
    seconds, write, start = [0.0], GrammarWalk.write_mask, MaskThread.start

    def costing(call, cost):
        def costly(*arguments):
            seconds[0] += cost
            return call(*arguments)

        return costly

    monkeypatch.setattr(grammar_masks, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    monkeypatch.setattr(grammar_masks, "WORTH_A_THREAD", -1)
    monkeypatch.setattr(GrammarWalk, "write_mask", costing(write, 1))
    monkeypatch.setattr(MaskThread, "start", costing(start, 5))
    made = GrammarMasks(compiler.matcher, num_threads=2)
    for row in range(MANY):
        made.add(str(row), grammar_of(StructuredOutputs(regex="[ab]{2,9}")))
    yield made, -(-len(tokenizer) // 32)
    made.close()


def ways(masks, num_rows, num_steps):
    """Whether a thread made the masks, of each of so many steps."""
    own, words = masks
    bits = np.zeros((num_rows, words), np.int32)
    held, taken = own.held([Constrained(row, row, str(row), 0) for row in range(num_rows)]), []
    for _ in range(num_steps):
        making = own.begin(bits, held, pytest.fail)
        assert own.finish(making, {}) == {}
        taken.append(making.job is not None)
    return taken


def test_what_few_rows_take_says_nothing_of_many(masks):
    for _ in range(3):  # as a single request comes between batches
        alone, many = ways(masks, 1, 40), ways(masks, MANY, 40)
        assert alone[-20:].count(True) <= 1
        assert many[-20:].count(False) <= 1
    assert ways(masks, MANY, 10).count(False) <= 1, "it is known from the beginning"


@given(program=st.lists(st.integers(-30, 30), max_size=60))
def test_requests_of_a_grammar_are_dealt_out_evenly_whoever_leaves(program):
    """A number comes, or comes anew; its negative leaves."""
    asked, live = [], {}

    def new_matcher(grammar, lexer):
        asked.append(lexer)
        return SimpleNamespace(compute_ff_tokens=list, is_stopped=lambda: False)

    masks = GrammarMasks(new_matcher, num_threads=3)
    for number in [*range(1, 40), *program]:
        live.pop(abs(number), None)
        if number < 0:
            masks.remove(str(-number))
            continue
        users = [[*live.values()].count(lexer) for lexer in range(3)]
        masks.add(str(number), "grammar")
        masks._walk(str(number))
        worth = min(3, 1 + len(live) // grammar_masks.ROWS_OF_A_LEXER)
        live[number] = asked[-1]
        assert live[number] == users.index(min(users[:worth]))
    for number in live:
        masks.remove(str(number))
    assert not masks._users, "a grammar is kept for nobody"
    masks.close()
