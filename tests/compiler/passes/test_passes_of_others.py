"""What passes meet beside what we write: other spellings, constants that look alike, passes of others."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from lamina.common.errors import CompileError
from lamina.compiler import compile
from lamina.compiler.capture.split import split
from lamina.compiler.inspect import verify
from lamina.compiler.inspect.samples import sample_arguments
from lamina.compiler.passes import pipeline
from lamina.compiler.passes.canonicalise import CANONICALISE
from lamina.compiler.passes.graph import Pass, PassReport, copy_graph, frozen, is_same
from lamina.testing import run

from ..capture.test_odd_models import CPU, capture_of, compiled, embedded, site, weights_of

ATEN = torch.ops.aten
NUMBERS = st.one_of(st.floats(), st.integers(-3, 3), st.booleans(), st.complex_numbers())


def first_piece(body, dtype=torch.float32):
    def forward(weights, ids, positions, attend):
        return site(attend, 0, body(weights, embedded(weights, ids)))

    captured = capture_of(forward, weights_of(dtype))
    return split(captured.graph, captured.inputs).pieces[0].graph


def reports(body, folder, dtype=torch.float32):
    graph = verify.pass_stages(first_piece(body, dtype), (), folder)[0][1]
    rewritten = pipeline.rewrite(graph, pipeline.select(None, "fast"))
    return {report.name: report for report in rewritten.reports}


def norm_by_a_power_of_2_0(weights, x):
    return x * torch.rsqrt(x.pow(2.0).mean(-1, keepdim=True) + 1e-6) * weights["norm"]


def norm_of_torch(weights, x):
    return F.rms_norm(x, (x.shape[-1],), weights["norm"], 1e-6)


@pytest.mark.parametrize("body", [norm_by_a_power_of_2_0, norm_of_torch])
def test_other_spellings_of_the_norm_are_found(body, tmp_path):
    found = reports(body, tmp_path)
    assert found["rms_norm"].num_matches == 1
    weights, x = weights_of(), torch.randn(7, 16)
    op = torch.ops.lamina.rms_norm.default(x, weights["norm"], 1e-6)
    torch.testing.assert_close(op, body(weights, x))


def test_a_norm_that_rounds_after_its_weight_is_left_alone_and_says_why(tmp_path):
    found = reports(norm_of_torch, tmp_path, torch.bfloat16)
    assert found["rms_norm"].num_matches == 0
    assert "rounds after the weight" in " ".join(found["rms_norm"].skipped + found["add_rms_norm"].skipped)


@given(NUMBERS, NUMBERS)
def test_constants_are_equal_if_they_compute_the_same(one, other):
    same = type(one) is type(other) and repr(one) == repr(other)
    assert (frozen([one, {"a": (other,)}]) == frozen([other, {"a": (one,)}])) == same


def graph_of(body):
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(3)
    graph.output(tuple(body(graph, x)))
    for node in graph.nodes:
        if node.op == "call_function":
            arguments = [torch.ones(3) if isinstance(value, fx.Node) else value for value in node.args]
            node.meta["val"] = node.target(*arguments)
    return graph


@pytest.mark.parametrize("one, other", [(0.0, -0.0), (1, 1.0), (float("nan"), float("nan"))])
def test_zeros_of_different_signs_are_not_merged(one, other):
    def body(graph, x):
        for value in (one, other):
            zero = graph.call_function(ATEN.mul.Tensor, (x, value))
            yield graph.call_function(ATEN.reciprocal.default, (zero,))

    graph = graph_of(body)
    after, _ = CANONICALISE.run(graph)
    x = [torch.tensor([1.0, -2.0, 3.0])]
    for before, result in zip(run(graph, x), run(after, x), strict=True):
        assert torch.equal(before.nan_to_num(7.0), result.nan_to_num(7.0))


def step(run_it, name="theirs", scope="piece"):
    return Pass(name=name, version=1, reason="", contract="", run=run_it, scope=scope)


def untouched(graph):
    return copy_graph(graph), PassReport(name="theirs", num_matches=0)


def mutates(graph):
    next(node for node in graph.nodes if node.op == "call_function").meta["seen"] = True
    return untouched(graph)


def mutates_arguments(graph):
    node = next(node for node in graph.nodes if node.op == "call_function")
    node.args = (*node.args[:-1], 5)
    return untouched(graph)


def raises(graph):
    raise IndexError("off by one")


def returns_nothing(graph):
    copy_graph(graph)


def returns_a_graph_alone(graph):
    return copy_graph(graph)


def leaves_a_hole(graph):
    copy = copy_graph(graph)
    node = next(node for node in copy.nodes if node.op == "call_function")
    users = list(node.users)
    copy.erase_node(copy.output_node())
    copy.output((graph.find_nodes(op="placeholder")[0], *users))
    return copy, PassReport(name="theirs", num_matches=1)


BROKEN = [
    (mutates, "changed the graph it was given"),
    (mutates_arguments, "changed the graph it was given"),
    (raises, "raised IndexError\\('off by one'\\)"),
    (returns_nothing, "returned NoneType; wanted a tuple of graph and PassReport"),
    (returns_a_graph_alone, "returned Graph; wanted a tuple"),
    (leaves_a_hole, "made a graph that is none"),
]


@pytest.mark.parametrize("broken, message", BROKEN, ids=[body.__name__ for body, _ in BROKEN])
@pytest.mark.parametrize("scope", ["piece", "model"])
def test_a_pass_that_breaks_its_promise_is_named(broken, message, scope):
    graph = graph_of(lambda graph, x: [graph.call_function(ATEN.mul.Tensor, (x, 2.0))])
    rewrite = pipeline.rewrite if scope == "piece" else pipeline.rewrite_model
    with pytest.raises(CompileError, match=f"the pass 'theirs' {message}"):
        rewrite(graph, (CANONICALISE, step(broken, scope=scope)))


def swap(graph, old, new):
    graph = copy_graph(graph)
    sites = graph.find_nodes(op="call_function", target=old) or graph.find_nodes(op="call_method", target=old)
    for node in sites:
        node.target = new
    return graph, PassReport(name="theirs", num_matches=len(sites))


def tanh_to_sigmoid(graph):
    return swap(graph, torch.tanh, torch.sigmoid)


def later_layers_first(graph):
    graph = copy_graph(graph)
    sites = [node for node in graph.nodes if "attention_site" in str(node.target)]
    layers = [node.args[4] for node in sites]
    for node, layer in zip(sites, reversed(layers), strict=True):
        node.args = (*node.args[:4], layer, *node.args[5:])
    return graph, PassReport(name="theirs", num_matches=1)


def squashed(weights, ids, positions, attend):
    x = torch.tanh(embedded(weights, ids))
    return site(attend, 1, torch.tanh(site(attend, 0, x)))


def quietly(wrong):
    """The same pass, which reports that it did nothing, under another's name."""

    def run_it(graph):
        return wrong(graph)[0], PassReport(name="canonicalise", num_matches=0)

    return run_it


@pytest.mark.parametrize(
    "wrong", [tanh_to_sigmoid, later_layers_first, quietly(tanh_to_sigmoid), quietly(later_layers_first)]
)
def test_a_wrong_pass_over_the_whole_model_is_found_and_named(wrong, store):
    settings = {"passes": (*pipeline.PASS_NAMES, step(wrong, scope="model"))}
    with pytest.raises(CompileError, match=r"the rewritten model errs by .* the pass theirs makes it so"):
        compiled(squashed, weights_of(), store, **settings)
    assert not store.refs("plans"), "what is wrong is not kept"


def test_of_the_whole_model_only_what_changed_is_run_again(store, monkeypatch):
    stages = []
    monkeypatch.setattr(compile, "require_right_model", lambda graph, changed, *_: stages.extend(changed))
    own = (step(untouched, "first", "model"), step(renames, "second", "model"))
    compiled(squashed, weights_of(), store, passes=own)
    assert stages == []
    compiled(squashed, weights_of(), store, passes=(*own, step(twice_negated, scope="model")))
    assert stages == ["theirs"]


def renames(graph):
    graph = copy_graph(graph)
    for node in graph.nodes:
        node.name = f"renamed_{node.name}"
    return graph, PassReport(name="second", num_matches=7)


def twice_negated(graph):
    graph = copy_graph(graph)
    for node in graph.find_nodes(op="call_function", target=torch.tanh):
        with graph.inserting_after(node):
            once = graph.call_function(torch.neg, (node,))
        with graph.inserting_after(once):
            twice = graph.call_function(torch.neg, (once,))
        node.replace_all_uses_with(twice, lambda user, once=once: user is not once)
        once.meta = twice.meta = dict(node.meta)
    return graph, PassReport(name="theirs", num_matches=0)


def test_code_that_is_right_for_one_piece_is_checked_again_for_another(store):
    """A pass that makes a piece into one which is in the store already, and which is not what it says."""

    def sigmoids(weights, ids, positions, attend):
        x = torch.sigmoid(embedded(weights, ids))
        return site(attend, 1, torch.sigmoid(site(attend, 0, x)))

    compiled(sigmoids, weights_of(), store)
    passes = (*pipeline.PASS_NAMES, step(tanh_to_sigmoid_in_a_piece))
    with pytest.raises(CompileError, match="the pass theirs makes it so"):
        compiled(squashed, weights_of(), store, passes=passes)


@pytest.mark.parametrize("change", [(0.0, -0.0), (1, True), (1, 1.0), ("tanh", "relu")], ids=str)
def test_graphs_are_the_same_by_what_they_compute(change):
    def of(value):
        return graph_of(lambda graph, x: [graph.call_function(ATEN.mul.Tensor, (x, value))])

    one, other = (of(value) if not isinstance(value, str) else graph_of_method(value) for value in change)
    assert is_same(one, copy_graph(one))
    assert not is_same(one, other)
    assert not is_same(one, fx.Graph())


def graph_of_method(name):
    graph = fx.Graph()
    graph.output((graph.call_method(name, (graph.placeholder("x"),)),))
    return graph


def test_integers_are_compared_exactly():
    module = first_piece(lambda weights, x: x)
    graph = copy_graph(module.graph)
    output = graph.output_node()
    (results,) = output.args
    with graph.inserting_before(output):
        whole = graph.call_method("int", (results[0],))
    output.args = ((whole,),)
    integers = fx.GraphModule(module, graph)
    arguments = sample_arguments(integers, CPU)
    right = integers(*arguments)
    assert verify.check_piece(integers, lambda given: right, arguments, "fast").is_right
    other = (right[0].clone(),)
    other[0].view(-1)[5] += 1
    assert not verify.check_piece(integers, lambda given: other, arguments, "fast").is_right


WRONG = {
    "an infinity less": lambda result: result.nan_to_num(posinf=1e30, neginf=-1e30),
    "a zero where the row is small": lambda result: torch.where(result.abs() < 1e-9, 0.0, result),
    "a bound of large numbers": lambda result: result.clamp(-1e6, 1e6),
    "a NaN for an infinity": lambda result: torch.where(result.isinf(), torch.nan, result),
    "the last row of many": lambda result: torch.cat([result[:64], result[64:] * 0]),
    "a row alone": lambda result: result * 0 if len(result) == 1 else result,
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_code_that_is_wrong_on_odd_rows_or_counts_alone_is_found_wrong(wrong):
    def forward(weights, ids, positions, attend):
        return site(attend, 0, embedded(weights, ids)) * 2

    captured = capture_of(forward, weights_of())
    module = split(captured.graph, captured.inputs).pieces[-1].graph

    def is_right(change):
        checks = [
            verify.check_piece(module, lambda given: tuple(map(change, module(*given))), arguments, "fast")
            for arguments in verify.all_samples(module, CPU)
        ]
        return all(check.is_right for check in checks)

    assert is_right(lambda result: result.clone())
    assert not is_right(wrong)


def tanh_to_sigmoid_in_a_piece(graph):
    return swap(graph, ATEN.tanh.default, ATEN.sigmoid.default)


def test_a_wrong_pass_of_the_users_own_is_named(store):
    passes = (*pipeline.PASS_NAMES, step(tanh_to_sigmoid_in_a_piece))
    with pytest.raises(CompileError, match=r"the pass theirs makes it so; leave it out of passes="):
        compiled(squashed, weights_of(), store, passes=passes)
