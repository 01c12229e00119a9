"""Pieces between attention calls: three unique ones whatever the depth, and nothing lost at the cuts."""

import pytest
import torch
from torch import fx

from lamina.compiler.capture.capture import NUM_TOKENS, POSITIONS, TOKEN_IDS, capture
from lamina.compiler.capture.fingerprint import canonical_text, group_equal
from lamina.compiler.capture.functionalize import is_attention
from lamina.compiler.capture.split import AttentionCall, PieceCall, split
from lamina.compiler.torch_internals import torch_compat

from ..tiny import CPU, make_tiny


def split_tiny(tiny):
    fake = torch_compat.fake_tensors(tiny.program.parameters, CPU)
    captured = capture(tiny.program.forward, fake, CPU)
    return captured, split(captured.graph, captured.inputs)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 6])
def test_a_uniform_stack_has_a_first_a_middle_and_a_last_piece(num_layers):
    _, model = split_tiny(make_tiny(num_layers=num_layers))
    groups = group_equal(canonical_text(piece.graph.graph) for piece in model.pieces)
    assert groups == [0, *[1] * (num_layers - 1), num_layers]


def test_biases_and_exact_ops_split_alike():
    _, model = split_tiny(make_tiny(num_layers=3, exact=True, attention_bias=True, mlp_bias=True))
    assert group_equal(canonical_text(piece.graph.graph) for piece in model.pieces) == [0, 1, 1, 3]


def test_pieces_and_attention_take_turns_and_layers_count_up():
    _, model = split_tiny(make_tiny(num_layers=3))
    assert [type(call) for call in model.calls] == [PieceCall, AttentionCall] * 3 + [PieceCall]
    assert [call.layer for call in model.calls if isinstance(call, AttentionCall)] == [0, 1, 2]


def test_every_value_is_given_before_it_is_taken_and_only_if_it_is():
    captured, model = split_tiny(make_tiny(num_layers=3))
    known = set(captured.inputs.values())
    taken = {model.result}
    given = set()
    for call in model.calls:
        inputs = call.tensors if isinstance(call, AttentionCall) else call.inputs
        assert set(inputs) <= known
        taken |= set(inputs)
        if isinstance(call, PieceCall):
            assert not set(call.outputs) & known
            given |= set(call.outputs)
            known |= set(call.outputs)
    assert given <= taken


def test_run_one_after_another_the_pieces_give_the_model():
    tiny = make_tiny(num_layers=3)
    _, model = split_tiny(tiny)
    for num_tokens in (1, 2, 7):
        ids, positions = tiny.tokens(num_tokens)
        values = tiny.weights | {TOKEN_IDS: ids, POSITIONS: positions, NUM_TOKENS: num_tokens}
        for call in model.calls:
            if isinstance(call, AttentionCall):
                tiny.attend(call.layer, *(values[name] for name in call.tensors))
            else:
                results = fx.Interpreter(call.graph).run(*(values[name] for name in call.inputs))
                values |= dict(zip(call.outputs, results, strict=True))
        assert torch.equal(values[model.result], tiny.eager(num_tokens))


def test_a_piece_holds_no_marker_and_only_tensors_cross_a_cut():
    _, model = split_tiny(make_tiny())
    for piece in model.pieces:
        assert not [node for node in piece.graph.graph.nodes if is_attention(node)]
        (results,) = piece.graph.graph.output_node().args
        assert all(isinstance(node.meta["example_value"], torch.Tensor) for node in results)


def test_items_of_a_tuple_stay_with_it():
    """Two items of one split, read on both sides of a cut, are outputs of the piece that split."""

    def forward(weights, ids, positions, attend):
        whole = torch.nn.functional.embedding(ids, weights["table"]).view(-1, 2, 16)
        query, key = whole.split(8, dim=-1)
        out = torch.empty_like(query)
        attend(0, query, key, key, out)
        return out + key

    captured = capture(forward, torch_compat.fake_tensors({"table": ((10, 32), torch.float32)}, CPU), CPU)
    first, _, last = split(captured.graph, captured.inputs).calls
    assert len(first.outputs) == 3
    assert len(last.inputs) == 2


def test_a_size_that_a_piece_uses_is_computed_in_it():
    def forward(weights, ids, positions, attend):
        hidden = torch.nn.functional.embedding(ids, weights["table"]).view(-1, 2, 8)
        twice = torch.cat([hidden, hidden]).size(0)
        out = torch.empty_like(hidden)
        attend(0, hidden, hidden, hidden, out)
        return out * twice

    captured = capture(forward, torch_compat.fake_tensors({"table": ((10, 16), torch.float32)}, CPU), CPU)
    first, _, last = split(captured.graph, captured.inputs).calls
    assert NUM_TOKENS in last.inputs
    values = {NUM_TOKENS: 3, **dict.fromkeys(first.outputs, torch.ones(3, 2, 8))}
    (result,) = fx.Interpreter(last.graph).run(*(values[name] for name in last.inputs))
    assert torch.equal(result, torch.full((3, 2, 8), 6.0))
