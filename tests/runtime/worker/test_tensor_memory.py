"""The memory of tensors that goes and comes, wherever the C library had it from."""

import threading

import torch

from lamina.runtime.worker.tensor_memory import TensorMemory

from ...resident_pages import resident_of

NUM_BYTES = 1 << 24


def allocated_in_a_thread(number):
    """Tensors in the heap of a thread, for which the C library maps no memory apart by then."""
    found = []

    def allocate():
        torch.ones(30 << 20, dtype=torch.uint8)  # once freed, less than this comes from heaps
        found.extend(torch.ones(NUM_BYTES, dtype=torch.uint8) for _ in range(number))

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    return found


def test_heaps_of_threads_give_it_back():
    tensors = allocated_in_a_thread(3)
    memory = TensorMemory(tensors)
    ranges = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    assert memory.num_bytes == 3 * NUM_BYTES <= resident_of(ranges)
    for _ in range(2):
        memory.drop()
        memory.drop()
        assert resident_of(ranges) <= 0.05 * memory.num_bytes
        memory.take()
        for tensor in tensors:
            tensor.fill_(7)
    assert all(bool((tensor == 7).all()) for tensor in tensors)
    assert sum(view.nbytes for view in memory.views()) == memory.num_bytes


def test_less_than_a_page_goes_and_comes_as_well():
    tensor = torch.arange(5.0)
    memory = TensorMemory([tensor, tensor[1:], torch.empty(0)])
    memory.drop()
    memory.take()
    assert tensor.fill_(2).sum() == 10
