"""lamina::attention_site: a mark in a graph, not a computation."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lamina.common.errors import UnsupportedError
from lamina.custom_ops import attention_site


def test_running_it_is_refused() -> None:
    x = torch.zeros(2, 4, 8)
    with pytest.raises(UnsupportedError, match="attend function"):
        attention_site(x, x, x, torch.zeros_like(x), 0)


def test_it_is_traced_with_its_layer_and_its_output() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        attention_site(q, k, v, out, 3)
        return out

    q, kv = torch.zeros(2, 4, 8), torch.zeros(2, 2, 8)
    graph = make_fx(attend, tracing_mode="fake")(q, kv, kv).graph
    sites = [node for node in graph.nodes if node.target is torch.ops.lamina.attention_site.default]
    assert [site.args[4] for site in sites] == [3]


def test_its_schema_says_that_only_the_output_is_written() -> None:
    schema = torch.ops.lamina.attention_site.default._schema
    assert [x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write] == ["out"]
