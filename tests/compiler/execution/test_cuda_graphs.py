"""CUDA graphs are captured beside other threads that use the GPU; here with a graph that is none."""

import contextlib
from typing import Any

import pytest
import torch

from lamina.compiler.execution import cuda_graphs
from lamina.compiler.execution.cuda_graphs import CudaGraphs


def test_what_other_threads_do_meanwhile_does_not_end_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    class Graph:
        def capture_begin(self, **settings: Any) -> None:
            said.append(settings)

        def capture_end(self) -> None:
            said.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(cuda_graphs, "_capture_stream", lambda device: None)
    graphs = CudaGraphs(torch.device("cuda"))
    _, result = graphs._capture_graph(lambda: said.append("run") or 7)
    assert result == 7
    assert said == [{"pool": (0, 1), "capture_error_mode": "thread_local"}, "run", "end"]
