"""CUDA graphs captured while other threads allocate memory of the same GPU."""

import threading
from collections.abc import Iterator

import pytest
import torch

from lamina.compiler.execution.cuda_graphs import CudaGraphs
from lamina.custom_ops import rms_norm

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def allocations() -> Iterator[threading.Event]:
    """A thread that takes memory from the driver and gives it back all the time; set once it has begun."""
    begun, over = threading.Event(), threading.Event()

    def allocate() -> None:
        torch.cuda.set_device(DEVICE)
        while not over.is_set():
            size = 96 << 20
            block = torch.cuda.caching_allocator_alloc(size, DEVICE)
            torch.cuda.caching_allocator_delete(block)
            torch.cuda.empty_cache()
            begun.set()

    thread = threading.Thread(target=allocate)
    thread.start()
    yield begun
    over.set()
    thread.join()


def test_a_capture_survives_another_threads_allocations(allocations: threading.Event) -> None:
    graphs = CudaGraphs(DEVICE)
    x, weight = torch.randn(64, 4096, device=DEVICE), torch.randn(4096, device=DEVICE)
    right = rms_norm(x, weight, 1e-5)
    allocations.wait()

    def run() -> torch.Tensor:
        out = x
        for _ in range(300):
            out = rms_norm(x, weight, 1e-5)
        return out

    for key in range(20):
        graphs.capture(key, run, [x])
        assert torch.equal(graphs.replay(key, [x], num_tokens=64, num_padded=64), right)
