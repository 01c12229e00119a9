"""Rotations that move into attention: those that may and no other, with the same bits, over the cut."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, seed
from torch import fx

from lamina.compiler.capture.fingerprint import canonical_text
from lamina.compiler.capture.split import AttentionCall, PieceCall, split
from lamina.compiler.passes import rotary_and_write
from lamina.compiler.passes.providers import choose
from lamina.compiler.passes.rotary_and_write import rotary_and_write_pass
from lamina.compiler.torch_internals import torch_compat
from lamina.testing import apply, assert_same_bits

from ..attention_programs import BODIES, AttentionProgram, attention_programs, capture_program, run
from ..pipelines import taken
from ..tally import PROVED

MOVE = rotary_and_write_pass(taken)
same_programs = seed(0)


def program_of(*layers, dtype=torch.bfloat16):
    return AttentionProgram(layers=layers, dtype=dtype)


def rewritten(program, step=MOVE):
    return step.run(capture_program(program).graph.graph)


def check_values(program, graph):
    before = capture_program(program).graph.graph
    for num_tokens in (1, 5):
        assert_same_bits(run(program, before, num_tokens), run(program, graph, num_tokens))


def check_census(program, report):
    assert report.num_matches == len(report.chosen) == program.num_sites


@same_programs
@given(attention_programs)
def test_what_may_move_does_and_no_bit_changes(program):
    graph, report = apply(MOVE, capture_program(program).graph.graph)
    graph.lint()
    check_census(program, report)
    check_values(program, graph)
    PROVED.update(programs=1, planted=program.num_sites, found=report.num_matches)


@same_programs
@given(attention_programs)
def test_a_second_run_finds_nothing_and_text_changes_only_with_a_match(program):
    before = capture_program(program).graph.graph
    graph, report = rewritten(program)
    again, second = MOVE.run(graph)
    assert (second.num_matches, canonical_text(again)) == (0, canonical_text(graph))
    assert (canonical_text(before) != canonical_text(graph)) == (report.num_matches > 0)


@pytest.mark.parametrize("kind", sorted(BODIES))
def test_each_layer_is_known_for_what_it_is_between_two_others(kind):
    check_all(program_of("plain", kind, "plain"))


REASONS = {
    "key_read_again": "needs what is rotated",
    "query_for_output": "needs what is rotated",
    "key_for_value": "the value or the output is rotated too",
    "output_as_the_query_lies": "needs what is rotated",
    "source_written_in_between": "may write in between",
}
SEEN_IN_VALUES = ("key_read_again", "key_for_value", "source_written_in_between")  # the others: layouts


@pytest.mark.parametrize("kind", REASONS)
def test_what_stays_is_reported_with_its_reason(kind):
    (skipped,) = rewritten(program_of(kind))[1].skipped
    assert REASONS[kind] in skipped


def check_all(program):
    graph, report = rewritten(program)
    check_values(program, graph)
    check_census(program, report)


def check_rewritten_values(program):
    check_values(program, rewritten(program)[0])


@pytest.mark.parametrize("kind", REASONS)
def test_a_precondition_left_out_is_caught(monkeypatch, kind):
    original = rotary_and_write._obstacle

    def forgetful(site, rotary):
        found = original(site, rotary)
        return None if found and REASONS[kind] in found else found

    monkeypatch.setattr(rotary_and_write, "_obstacle", forgetful)
    PROVED["faults"] += 1
    check = check_rewritten_values if kind in SEEN_IN_VALUES else check_all
    with pytest.raises((AssertionError, RuntimeError)):
        check(program_of(kind))
    PROVED["caught"] += 1


def swap_angles(site):
    *others, cos, sin = site.args
    site.args = (*others, sin, cos)


def swap_query_and_key(site):
    query, key, *others = site.args
    site.args = (key, query, *others)


def forget_the_angles(site):
    site.args = site.args[:5]


@pytest.mark.parametrize("mistake", [swap_angles, swap_query_and_key, forget_the_angles])
def test_a_site_written_wrongly_is_caught_by_the_values(mistake):
    def run_wrongly(graph):
        graph, report = MOVE.run(graph)
        for node in graph.nodes:
            if torch_compat.op_name(node.target) == rotary_and_write.SITE:
                mistake(node)
        return graph, report

    program = program_of("plain")
    graph, _ = rewritten(program, replace(MOVE, run=run_wrongly))
    PROVED["faults"] += 1
    with pytest.raises((AssertionError, RuntimeError)):
        check_values(program, graph)
    PROVED["caught"] += 1


def test_after_the_cut_attention_gets_the_angles_and_pieces_rotate_nothing():
    program = program_of("plain", "plain")
    captured = capture_program(program)
    graph, _ = rewritten(program)
    calls = split(fx.GraphModule(captured.graph, graph), captured.inputs).calls
    attentions = [call for call in calls if isinstance(call, AttentionCall)]
    assert [len(call.tensors) for call in attentions] == [6, 6]
    assert attentions[0].tensors[4:] == attentions[1].tensors[4:]
    targets = [
        node.target for call in calls if isinstance(call, PieceCall) for node in call.graph.graph.nodes
    ]
    assert rotary_and_write.ROTARY not in map(torch_compat.op_name, targets)


@pytest.mark.parametrize(
    "device, dtype, moves",
    [
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float32, True),
        ("cuda", torch.float64, False),
        ("cpu", torch.bfloat16, True),
        ("cpu", torch.float32, False),
        ("cpu", torch.float64, False),
    ],
)
def test_it_moves_for_dtypes_with_a_kernel(device, dtype, moves):
    assert choose("rotary_and_write_kv_cache", torch.device(device), dtype).is_op == moves
