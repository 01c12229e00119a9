"""The pass batch_invariant: every GEMM of a graph is told to sum in one order, or refused by name."""

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from lamina.common.errors import CompileError, ConfigError
from lamina.compiler.passes import pipeline
from lamina.compiler.passes.batch_invariant import BATCH_INVARIANT, FLAGS
from lamina.compiler.passes.gemms import gemms

OPS = torch.ops.lamina
X, WEIGHT, BIAS = torch.randn(5, 8), torch.randn(16, 8), torch.randn(16)


def graph_of(function, *arguments):
    return make_fx(function, tracing_mode="fake")(*arguments).graph


def run(function, *arguments):
    """The function after the pass, and what the pass says of it."""
    graph, report = BATCH_INVARIANT.run(graph_of(function, *arguments))
    return fx.GraphModule({}, graph), report


def flags(module):
    nodes = [node for node in module.graph.nodes if node.target in FLAGS]
    return [node.args[FLAGS[node.target]] for node in nodes]


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda x, w: x @ w.T, (X, WEIGHT)),
        (lambda x, w, b: torch.nn.functional.linear(x, w, b), (X, WEIGHT, BIAS)),
        (lambda x, w: OPS.linear.default(x, w, None), (X, WEIGHT)),
        (lambda x, w: OPS.linear.default(x, w), (X, WEIGHT)),
        (
            lambda x, w, n: OPS.add_rms_norm_linear.default(x, x, n, 1e-5, w, None, True)[0],
            (X, WEIGHT, torch.rand(8)),
        ),
    ],
)
def test_a_gemm_by_a_weight_is_told(function, arguments):
    module, report = run(function, *arguments)
    assert flags(module) == [True]
    assert report.num_matches == 1
    torch.testing.assert_close(module(*arguments), function(*arguments))
    assert [gemm.batch_invariant for gemm in gemms(module.graph)] == [True]


@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (lambda x, w: x @ w, (X, WEIGHT.T.contiguous()), "aten.mm"),
        (lambda x, w: torch.bmm(x, w), (X[None], WEIGHT.T[None]), "aten.bmm"),
        (lambda x, w, s: OPS.linear_int8.default(x, w, s), (X, WEIGHT.to(torch.int8), BIAS), "linear_int8"),
    ],
)
def test_another_gemm_is_refused_by_its_name(function, arguments, named):
    with pytest.raises(CompileError, match=rf"\(?{named}.*has other bits in other batches"):
        run(function, *arguments)


def test_the_pass_runs_last_and_cannot_be_chosen_or_left_out():
    for chosen in (None, (), ("linear", "lower")):
        for numerics in ("fast", "exact"):
            assert pipeline.select(chosen, numerics, batch_invariant=True)[-1] is BATCH_INVARIANT
            assert BATCH_INVARIANT not in pipeline.select(chosen, numerics)
    with pytest.raises(ConfigError, match="passes names"):
        pipeline.check_passes(["batch_invariant"])
    assert "batch_invariant@1" in pipeline.describe(pipeline.select(None, "fast", batch_invariant=True))
