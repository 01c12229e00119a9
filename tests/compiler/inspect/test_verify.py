"""Compiled pieces are checked against what they were compiled from; a faulty pass is found and named."""

import dataclasses

import pytest
import torch
from torch import fx

from lamina.common.errors import CompileError, ConfigError
from lamina.common.store import Store
from lamina.compiler.codegen import wrapper
from lamina.compiler.codegen.inductor import compile_piece, missing_of_piece
from lamina.compiler.compile import compile_program, split_program
from lamina.compiler.config import CompileConfig
from lamina.compiler.inspect import verify
from lamina.compiler.inspect.samples import sample_arguments
from lamina.compiler.inspect.verify import Culprit, Error
from lamina.compiler.passes import pipeline
from lamina.compiler.passes.graph import copy_graph
from lamina.custom_ops._shared import library
from lamina.custom_ops.linear_blocks.layout import KINDS

from ..tiny import make_tiny

pytestmark = pytest.mark.timeout(600)
CPU = torch.device("cpu")
EPS = torch.finfo(torch.float32).eps


def changed(step, change):
    """A pass that does what it did, and then something wrong."""

    def run(graph):
        after, report = step.run(graph)
        after = copy_graph(after)
        change(after)
        return after, report

    return dataclasses.replace(step, run=run, version=99)


def another_eps(graph):
    for node in graph.nodes:
        if node.target in (torch.ops.lamina.rms_norm.default, torch.ops.lamina.add_rms_norm.default):
            node.args = (*node.args[:-1], 1e-2)


def no_gate(graph):
    for node in graph.nodes:
        if node.target is torch.ops.lamina.silu_and_mul.default:
            with graph.inserting_before(node):
                doubled = graph.call_function(torch.ops.aten.mul.Tensor, (node.args[0], 2.0))
            doubled.meta = dict(node.args[0].meta)
            node.args = (doubled,)


def subtract(graph):
    for node in graph.nodes:
        if node.target is torch.ops.aten.add.Tensor and isinstance(node.args[1], torch.fx.Node):
            node.target = torch.ops.aten.sub.Tensor
            return


MUTANTS = {
    "canonicalise": subtract,
    "add_rms_norm": another_eps,
    "rms_norm": another_eps,
    "silu_and_mul": no_gate,
}


def with_mutant(name, numerics="fast"):
    steps = pipeline.select(None, numerics)
    return tuple(changed(step, MUTANTS[name]) if step.name == name else step for step in steps)


def middle(tiny, numerics):
    model = split_program(tiny.program, pipeline.select(None, numerics))
    return model.pieces[1].graph


def op_by_op(module, folder):
    """Stands for compiled code without compiling: the graph after passes, interpreted."""

    def compile_with(passes):
        graph = verify.pass_stages(module, passes, folder)[-1][1]
        return lambda arguments: torch.fx.Interpreter(torch.fx.GraphModule({}, graph)).run(*arguments)

    return compile_with


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_what_the_passes_make_of_a_piece_is_right(dtype, numerics, tmp_path):
    module = middle(make_tiny(dtype=dtype, exact=numerics == "exact"), numerics)
    call = op_by_op(module, tmp_path)(pipeline.select(None, numerics))
    check = verify.check_piece(module, call, sample_arguments(module, CPU), numerics)
    assert check.is_right
    assert 0 < check.compiled.rms < 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["canonicalise", "add_rms_norm", "silu_and_mul"])
def test_the_faulty_pass_is_named(name, tmp_path):
    module, passes = middle(make_tiny(), "fast"), with_mutant(name)
    arguments, compile_with = sample_arguments(module, CPU), op_by_op(module, tmp_path)
    assert not verify.check_piece(module, compile_with(passes), arguments, "fast").is_right
    culprit = verify.find_culprit(module, passes, arguments, "fast", tmp_path, compile_with)
    assert (culprit.name, culprit.is_pass) == (name, True)
    without = [step for step in passes if step.name != name]
    assert verify.check_piece(module, compile_with(without), arguments, "fast").is_right


def test_code_that_is_wrong_after_one_pass_alone_is_blamed_on_it(tmp_path):
    module, passes = middle(make_tiny(), "fast"), pipeline.select(None, "fast")
    arguments, compile_with = sample_arguments(module, CPU), op_by_op(module, tmp_path)

    def miscompiled(chosen):
        call = compile_with(chosen)
        is_wrong = "silu_and_mul" in [step.name for step in chosen]
        return lambda given: tuple(value * (1.5 if is_wrong else 1) for value in call(given))

    culprit = verify.find_culprit(module, passes, arguments, "fast", tmp_path, miscompiled)
    assert culprit.name == "silu_and_mul"

    def always_wrong(chosen):
        call = compile_with(chosen)
        return lambda given: tuple(value * 1.5 for value in call(given))

    culprit = verify.find_culprit(module, passes, arguments, "fast", tmp_path, always_wrong)
    assert (culprit.name, culprit.is_pass) == ("code generation", False)


def test_compiling_with_a_faulty_pass_stops_and_says_how_to_leave_it_out(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "PIPELINE", with_mutant("rms_norm"))
    with pytest.raises(CompileError, match=r"the pass rms_norm makes it so.*--without-pass rms_norm"):
        compile_program(make_tiny().program, CompileConfig(), "fast", Store(tmp_path))
    assert not Store(tmp_path).refs("plans"), "what is wrong is not kept"
    assert not Store(tmp_path).refs("pieces")


def doubled(op, device):
    """An op called directly that gives twice what it should."""
    right = library.direct_call(op, device)

    def wrong(*arguments):
        result = right(*arguments)
        (result if isinstance(result, torch.Tensor) else result[0]).mul_(2)
        return result

    return wrong


def test_the_check_of_a_piece_runs_what_is_served_and_what_nobody_checked_is_checked_before_use(
    store, monkeypatch
):
    module, judged = middle(make_tiny(dtype=torch.bfloat16), "fast"), []

    def check(call):
        judged.append(verify.check_piece(module, call, sample_arguments(module, CPU), "fast").is_right)

    def compiled(check):
        return compile_piece(module, pipeline.select(None, "fast"), store, CPU, {}, check)

    with monkeypatch.context() as patch:  # only a piece that calls our ops directly meets this one
        patch.setattr(wrapper, "direct_call", doubled)
        artifact = compiled(check).artifact
    assert judged == [False]
    store.write_ref("pieces", artifact.key, dataclasses.asdict(artifact) | {"is_checked": False})
    assert missing_of_piece(artifact.key, store, must_be_checked=False) is None
    assert "checked" in missing_of_piece(artifact.key, store, must_be_checked=True)
    assert not compiled(None).artifact.is_checked
    assert compiled(check).artifact.is_checked
    assert compiled(check).artifact.is_checked
    assert judged == [False, True], "once"


def test_errors_are_relative_and_infinite_for_nan():
    right = torch.tensor([3.0, 4.0, 0.0, 0.0])
    assert verify.error_of(right, right) == Error(rms=0.0, max=0.0)
    assert verify.error_of(right + 0.25, right) == Error(rms=0.1, max=0.1)
    assert verify.error_of(right * torch.nan, right).rms == float("inf")


def test_rounding_explains_twice_the_plain_error_and_no_more():
    naive = Error(rms=1e-3, max=1e-2)
    assert Error(rms=1.9e-3, max=3e-2).is_explained_by(naive, EPS)
    assert not Error(rms=2.1e-3, max=3e-2).is_explained_by(naive, EPS)
    assert not Error(rms=1.9e-3, max=5e-2).is_explained_by(naive, EPS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_last_bit_that_rounds_activations_the_other_way_is_rounding_and_a_tenth_of_a_product_is_not(kind):
    graph, shapes = fx.Graph(), {"x": (7, 256), "weight": (32, KINDS[kind].row_bytes(256))}
    x, weight = (graph.placeholder(name) for name in shapes)
    for node in (x, weight):
        dtype = torch.uint8 if node is weight else torch.float32
        node.meta["example_value"] = torch.empty(shapes[node.name], dtype=dtype)
    product = graph.call_function(torch.ops.lamina.linear_blocks.default, (x, weight, None, kind))
    graph.output((product,))
    module = fx.GraphModule({}, graph)
    arguments = sample_arguments(module, CPU)
    for seed in range(50):
        arguments[0] = halfway(seed)
        (nudged,) = module(torch.nextafter(arguments[0], torch.full((), torch.inf)), arguments[1])
        assert not torch.equal(nudged, module(*arguments)[0])
        assert verify.check_piece(module, lambda given: [nudged], arguments, "fast").is_right  # noqa: B023
        wrong = 1.1 * nudged
        assert not verify.check_piece(module, lambda given: [wrong], arguments, "fast").is_right  # noqa: B023


def halfway(seed):
    """Activations of which some lie just below the middle of two numbers that they may be quantized to."""
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(seed))
    spans = x.view(7, 8, 32)
    step = spans.abs().amax(dim=2) / 127
    spans[:, :, 5] = (20.5 * step).nextafter(torch.zeros(()))
    return x


def test_a_culprit_says_what_to_do():
    nothing = Error(rms=0.0, max=0.0)
    assert "all_but('linear')" in Culprit(name="linear", is_pass=True, error=nothing).sentence()
    assert "passes=" in Culprit(name="my own", is_pass=True, error=nothing).sentence()
    assert "compile=False" in Culprit(name="code generation", is_pass=False, error=nothing).sentence()


def test_leaving_out_an_unknown_pass_is_an_error():
    assert "linear" not in pipeline.all_but("linear")
    with pytest.raises(ConfigError, match="nonsense"):
        pipeline.all_but("nonsense")
