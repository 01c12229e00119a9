"""One graph of a model for every number of tokens, or an error that says what stands in the way."""

import builtins
import types

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from lamina.common.errors import CompileError
from lamina.compiler.capture import capture as capture_module
from lamina.compiler.capture.capture import DISPOSITIONS, NUM_TOKENS, POSITIONS, TOKEN_IDS, capture
from lamina.compiler.capture.fingerprint import canonical_text, symbols
from lamina.compiler.compile import Program, compile_program
from lamina.compiler.config import CompileConfig
from lamina.compiler.torch_internals import torch_compat

from ..tiny import CPU, make_tiny

PARAMETERS = {"embedding": ((10, 8), torch.float32), "scale": ((8,), torch.float32)}
CLOSED_OVER = torch.ones(8)


def capture_forward(forward):
    return capture(forward, torch_compat.fake_tensors(PARAMETERS, CPU), CPU)


def embed(weights, ids):
    return F.embedding(ids, weights["embedding"])


@pytest.fixture(scope="module")
def captured():
    program = make_tiny().program
    return capture(program.forward, torch_compat.fake_tensors(program.parameters, CPU), CPU)


def test_every_input_is_a_weight_by_name_or_the_tokens(captured):
    tiny = make_tiny()
    unread = {"lm_head"}
    assert set(captured.inputs.values()) == (set(tiny.weights) - unread) | {
        TOKEN_IDS,
        POSITIONS,
        NUM_TOKENS,
    }
    assert len(set(captured.inputs.values())) == len(captured.inputs)


def test_the_number_of_tokens_is_the_one_symbol(captured):
    placeholder = next(
        node for node in captured.graph.graph.nodes if captured.inputs.get(node.name) == NUM_TOKENS
    )
    (symbol,) = symbols(str(placeholder.meta["example_value"]))
    assert symbols(str([node.meta.get("example_value") for node in captured.graph.graph.nodes])) == {symbol}
    assert "int32[T]" in canonical_text(captured.graph.graph)


def test_the_graph_gives_what_the_model_gives_for_any_number_of_tokens(captured):
    tiny = make_tiny()
    for num_tokens in (1, 2, 7, 8):
        ids, positions = tiny.tokens(num_tokens)
        known = tiny.weights | {TOKEN_IDS: ids, POSITIONS: positions, NUM_TOKENS: num_tokens}
        inputs = [
            known[captured.inputs[node.name]] for node in captured.graph.graph.find_nodes(op="placeholder")
        ]
        (result,) = WithAttention(captured.graph, tiny.attend).run(*inputs)
        assert torch.equal(result, tiny.eager(num_tokens))


class WithAttention(fx.Interpreter):
    """Runs a captured graph with attention where the marker stands."""

    def __init__(self, module, attend):
        super().__init__(module)
        self.attend = attend

    def call_function(self, target, args, kwargs):
        if torch_compat.op_name(target) == "lamina::attention_site":
            *tensors, layer = args[:5]
            return self.attend(layer, *tensors)
        return super().call_function(target, args, kwargs)


def test_every_guard_has_its_disposition(captured):
    assert captured.guards
    assert {guard.disposition for guard in captured.guards} <= set(DISPOSITIONS)
    assert all(guard.kind in DISPOSITIONS[guard.disposition] for guard in captured.guards)


def test_a_kind_of_guard_that_nothing_covers_fails_the_capture(monkeypatch):
    monkeypatch.setattr(capture_module, "DISPOSITIONS", {})
    with pytest.raises(CompileError, match=r"a guard that nothing covers: \w+ on "):
        capture_forward(lambda weights, ids, positions, attend: embed(weights, ids))


def prints(weights, ids, positions, attend):
    print("a line of its own")
    return embed(weights, ids)


def branches_on_the_number_of_tokens(weights, ids, positions, attend):
    return embed(weights, ids) * (2 if ids.shape[0] > 5 else 3)


def branches_on_a_value(weights, ids, positions, attend):
    return embed(weights, ids) * (2 if ids.max() > 5 else 3)


def works_for_seven_tokens(weights, ids, positions, attend):
    return embed(weights, ids).view(7, 8) * 2


def works_for_multiples_of_four(weights, ids, positions, attend):
    return embed(weights, ids).view(-1, 4, 8) * 2


def checks_the_number_of_tokens(weights, ids, positions, attend):
    torch._check(ids.shape[0] % 8 == 0)
    return embed(weights, ids) * 2


def reads_a_value(weights, ids, positions, attend):
    return embed(weights, ids) * ids.max().item()


def selects_by_value(weights, ids, positions, attend):
    return embed(weights, ids)[ids > 3]


def closes_over_a_tensor(weights, ids, positions, attend):
    return embed(weights, ids) * CLOSED_OVER


def returns_a_pair(weights, ids, positions, attend):
    return embed(weights, ids), ids


@pytest.mark.parametrize(
    "forward, message",
    [
        (prints, r"(?s)could not capture .*`print`.*a line of its own"),
        (branches_on_the_number_of_tokens, r"(?s)data-dependent expression u\d > 5.*test_capture\.py"),
        (branches_on_a_value, r"(?s)could not capture .*if ids\.max\(\) > 5"),
        (works_for_seven_tokens, r"works for exactly 7 tokens; wanted any number"),
        (works_for_multiples_of_four, r"only for numbers of tokens with Eq\(.*4.*\); wanted 1 to 8192"),
        (
            checks_the_number_of_tokens,
            r"only for numbers of tokens with Eq\(Mod\(u\d, 8\), 0\); wanted 1 to 8192",
        ),
        (reads_a_value, r"(?s)depends on the values of tensors.*line \d+, in reads_a_value\n .*\.item\(\)"),
        (
            selects_by_value,
            r"(?s)depends on the values of tensors.*line \d+, in selects_by_value\n .*\[ids > 3\]",
        ),
        (closes_over_a_tensor, r"(?i)neither a weight nor an input: \w*closed_over"),
        (returns_a_pair, r"forward returned tuple; wanted one tensor"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_captured_is_named(forward, message):
    with pytest.raises(CompileError, match=message):
        capture_forward(forward)


@torch.compiler.assume_constant_result
def taken_as_constant():
    return 2.0


def calls_a_constant(weights, ids, positions, attend):
    return embed(weights, ids) * taken_as_constant()


def kept_out(x):
    return x * 2


OF_ANOTHER_MODULE = types.FunctionType(
    kept_out.__code__, {"__name__": "json", "__builtins__": builtins}, "of_another_module"
)


def calls_a_function_of_another_scope(weights, ids, positions, attend):
    return OF_ANOTHER_MODULE(embed(weights, ids))


@pytest.mark.parametrize(
    "forward, message",
    [
        (calls_a_constant, r"taken_as_constant .*, whose result is taken as a constant"),
        (calls_a_function_of_another_scope, r"whose globals are not those of the module json"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_no_later_start_could_read_again_is_refused_by_name(forward, message):
    with pytest.raises(CompileError, match=message):
        capture_forward(forward)


def test_a_function_that_is_kept_out_of_the_trace_is_refused_by_name():
    torch.compiler.allow_in_graph(kept_out)
    with pytest.raises(CompileError, match=r"kept_out, which was kept out of the trace"):
        capture_forward(lambda weights, ids, positions, attend: kept_out(embed(weights, ids)))


def holds_a_constant(weights, ids, positions, attend):
    return embed(weights, ids) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])


def writes_into_a_weight(weights, ids, positions, attend):
    weights["scale"].mul_(2)
    return embed(weights, ids) * weights["scale"]


@pytest.mark.parametrize(
    "forward, message",
    [
        (holds_a_constant, r"(?s)made by the model's own code.*line \d+, in holds_a_constant"),
        (writes_into_a_weight, r"writes into a weight or an input of the model"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_no_piece_may_hold_is_named(forward, message, store):
    program = Program(forward=forward, parameters=PARAMETERS, key={}, sources=(), device=CPU)
    with pytest.raises(CompileError, match=message):
        compile_program(program, CompileConfig(), "fast", store)


def test_capturing_leaves_no_trace_of_itself():
    """No graph of Dynamo's stays behind: a second capture is a first one."""
    texts = [
        canonical_text(capture_forward(lambda w, ids, p, a: embed(w, ids)).graph.graph) for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
