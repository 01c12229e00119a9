"""Random arguments for a graph: within what their dtypes hold, and of the shapes asked for."""

import pytest
import torch
from torch import fx

from lamina.compiler.inspect.samples import sample_arguments


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_whole_numbers_of_any_width_are_drawn_for_matrices_of_many_rows(dtype: torch.dtype) -> None:
    graph, example = fx.Graph(), torch.empty(4096, 8, dtype=dtype)
    graph.placeholder("weight").meta["example_value"] = example
    graph.output(())
    (drawn,) = sample_arguments(fx.GraphModule({}, graph), torch.device("cpu"))
    assert (drawn.shape, drawn.dtype) == (example.shape, dtype)
    assert drawn.unique().numel() > 5
