"""Random arguments for a graph: within what their dtypes hold, and of the shapes asked for."""

import pytest
import torch
from torch import fx

from lamina.compiler.inspect.samples import sample_arguments
from lamina.custom_ops.linear_blocks.layout import KINDS, by_rows
from lamina.custom_ops.linear_blocks.runs import num_bytes, runs_of, split


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_whole_numbers_of_any_width_are_drawn_for_matrices_of_many_rows(dtype: torch.dtype) -> None:
    graph, example = fx.Graph(), torch.empty(4096, 8, dtype=dtype)
    graph.placeholder("weight").meta["example_value"] = example
    graph.output(())
    (drawn,) = sample_arguments(fx.GraphModule({}, graph), torch.device("cpu"))
    assert (drawn.shape, drawn.dtype) == (example.shape, dtype)
    assert drawn.unique().numel() > 5


@pytest.mark.parametrize("kind", [*KINDS, "Q4_K:20+Q6_K:12", "Q8_0:16+Q4_0:16"])
@pytest.mark.parametrize("columns", [256, 4096])
def test_blocks_are_drawn_as_a_model_has_them(kind: str, columns: int) -> None:
    """Bytes of any value would be scales that are no numbers, or one that is above all others."""
    runs, graph = runs_of(kind), fx.Graph()
    shape = (num_bytes(runs, columns),) if runs else (32, KINDS[kind].row_bytes(columns))
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    x.meta["example_value"] = torch.empty(4, columns)
    weight.meta["example_value"] = torch.empty(shape, dtype=torch.uint8)
    graph.call_function(torch.ops.lamina.linear_blocks.default, (x, weight, None, kind))
    graph.output(())
    _, drawn = sample_arguments(fx.GraphModule({}, graph), torch.device("cpu"))
    for own, rows in split(drawn, kind):
        dense = KINDS[own].numbers(by_rows(rows, own)).dense()
        sizes = dense.square().sum(dim=1).sqrt()
        assert 0.5 < float(sizes.min()) < 1 < float(sizes.max()) < 2
        assert dense.unique().numel() > 14
