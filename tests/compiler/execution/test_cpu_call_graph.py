"""Steps on a CPU by the captured calls of their kernels: what is captured, refused, not trusted."""

import ctypes

import pytest
import torch

from lamina.common.errors import CompileError
from lamina.compiler.codegen import torch_wrapper
from lamina.compiler.execution.cpu_call_graph import MAX_TOKENS, CpuCallGraphs
from lamina.custom_ops._shared.call_capture import add_call, capturable, statically_allocated, uncapturable

empty = statically_allocated(torch_wrapper.wrapper_values()["torch._C._dynamo.guards._empty_strided_cpu"])


@capturable
def double(x, out):
    """As native code does: torch sees nothing of it."""
    out.numpy()[:] = x.numpy() * 2


def copy(x, out):
    """A kernel that knows addresses alone."""
    addresses = out.data_ptr(), x.data_ptr(), x.nbytes
    add_call(ctypes.memmove, addresses, ctypes.memmove(*addresses))


def attend(*_):
    raise AssertionError("nobody attends here")


class Steps:
    """Steps over tensors that stay where they are, as those of the input batch do; whole with `finish`."""

    def __init__(self, forward, num_tokens=3, finish=None, graphs=None):
        self.graphs, self.forward = graphs or CpuCallGraphs(forward), forward
        self.finish = finish
        self.ids = torch.zeros(num_tokens, dtype=torch.int32)
        self.positions = torch.zeros(num_tokens, dtype=torch.int32)

    @torch.inference_mode()
    def run(self, step):
        """What the graphs give, and what the plan does."""
        self.ids.copy_(torch.arange(len(self.ids)) + 10 * step)
        self.positions.fill_(step)
        given = self.ids, self.positions, attend
        if self.finish is None:
            return self.graphs.forward(*given, given[:2]).clone(), self.forward(*given)
        got = [result.clone() for result in self.graphs.whole_step(*given, given[:2], self.finish)]
        hidden = self.forward(*given)
        return torch.cat(got, dim=1), torch.cat([hidden, *self.finish(hidden)], dim=1)


def layers(num_layers):
    """Kernels, allocations, views and what torch computes, in turn."""

    def forward(ids, positions, attend):
        x = ids.float() + positions  # both by torch
        for _ in range(num_layers):
            doubled = empty((len(ids), 2), (2, 1), torch.float32)
            double(x[:, None].expand(-1, 2).contiguous(), doubled)
            total = doubled.new_empty(len(ids))
            torch.sum(doubled.view(-1, 2), 1, out=total)
            x = total.sigmoid_()
        return x[:, None]

    return forward


def test_a_captured_step_computes_with_what_its_inputs_hold_now():
    steps = Steps(layers(2))
    for step in range(8):
        got, wanted = steps.run(step)
        assert torch.equal(got, wanted)
    assert steps.graphs.num_replays == 5  # the first runs, the second is captured, the third checks that


def test_a_step_that_reads_on_the_host_what_was_computed_is_never_captured():
    steps = Steps(lambda ids, positions, attend: ids.float()[:, None] * ids.max().item())
    for step in range(5):
        got, wanted = steps.run(step)
        assert torch.equal(got, wanted)
    assert steps.graphs.num_replays == 0


def run_and_count_warnings(steps, caplog):
    """Six steps, all right; how often it was said that a graph was not."""
    for step in range(6):
        got, wanted = steps.run(step)
        assert torch.equal(got, wanted)
    assert steps.graphs.num_replays == 0
    return caplog.text.count("of 3 tokens computes something else; such steps run without one")


def test_a_graph_that_a_second_step_finds_out_is_not_used_and_told_once(caplog):
    """tolist reads memory without torch's knowledge, so what it read lies in the graph."""
    steps = Steps(lambda ids, positions, attend: ids.float()[:, None] + positions.tolist()[0])
    assert run_and_count_warnings(steps, caplog) == 1


def test_a_kernel_that_does_not_tell_its_calls_is_found_out_by_what_is_read_afterwards(caplog):
    """As where a cache is written by one kernel and read by the next."""
    cache = torch.full((8, 3), -1.0)

    def forward(ids, positions, attend):
        cache[int(positions.numpy()[0])].numpy()[:] = ids.numpy()  # not captured
        return cache.index_select(0, positions[:1].long()).T.contiguous()

    assert run_and_count_warnings(Steps(forward), caplog) == 1


def test_code_that_says_it_tells_nothing_is_never_captured(caplog):
    piece = uncapturable(lambda arguments: (arguments[0] * 2.0,), "nobody knows it")
    steps = Steps(lambda ids, positions, attend: piece([ids])[0][:, None] + positions[:, None])
    with caplog.at_level("INFO", logger="lamina.compiler"):
        assert run_and_count_warnings(steps, caplog) == 0
    assert caplog.text.count("steps of 3 tokens have no CPU call graph: nobody knows it") == 1


def test_a_tensor_that_moved_is_an_error_and_not_read_at_its_old_place():
    steps = Steps(layers(1))
    for step in range(3):
        steps.run(step)
    steps.positions = steps.positions.clone()
    with pytest.raises(CompileError, match="moved since its capture"):
        steps.run(3)


def test_where_a_kernel_refuses_what_it_reads_the_step_itself_says_why():
    def read(ids):
        return -1 if ids.numpy().max() < 40 else 0

    def forward(ids, positions, attend):
        if check(ids) >= 0:
            raise ValueError("an id is too large")
        return ids.float()[:, None]

    def check(ids):
        result = read(ids)
        add_call(read, (ids,), result)
        return result

    steps = Steps(forward)
    for step in range(4):
        steps.run(step)
    assert steps.graphs.num_replays == 1
    with pytest.raises(ValueError, match="an id is too large"):
        steps.run(4)


def test_memory_of_graphs_grows_neither_with_layers_nor_with_sizes():
    """What kernels write lies where something else lay before."""

    def forward(num_layers):
        def run(ids, positions, attend):
            x = ids.float()
            for _ in range(num_layers):
                y = x.new_empty(len(ids))
                copy(x, y)
                x = y
            return x[:, None]

        return run

    def num_blocks(num_layers):
        steps = Steps(forward(num_layers))
        for step in range(4):
            got, wanted = steps.run(step)
            assert torch.equal(got, wanted)
        return len(steps.graphs._memory._blocks)

    assert num_blocks(40) == num_blocks(4)


def test_large_steps_are_not_captured():
    steps = Steps(layers(1), num_tokens=MAX_TOKENS + 1)
    for step in range(4):
        got, wanted = steps.run(step)
        assert torch.equal(got, wanted)
    assert steps.graphs.num_replays == 0


def kinds(steps):
    """What a graph is made of."""
    (graph,) = steps.graphs._graphs.values()
    return [type(call).__name__ for call, _ in graph._calls]


def test_a_whole_step_is_one_graph_and_its_ops_are_the_kernels_that_they_call():
    weight = torch.randn(5, 2)

    def forward(ids, positions, attend):
        return torch.ops.lamina.linear(torch.stack([ids, positions], dim=1).float(), weight.T @ weight)

    steps = Steps(forward, finish=lambda hidden: (torch.ops.lamina.linear(hidden, weight),))
    for step in range(8):
        got, wanted = steps.run(step)
        assert torch.equal(got, wanted)
    assert steps.graphs.num_replays == 5
    assert kinds(steps)[-1] == "PackedCalls", "both GEMMs at once"
    assert kinds(steps).count("PackedCalls") == 1


def test_where_a_whole_step_has_no_graph_its_forward_has_one():
    steps = Steps(layers(1), finish=lambda hidden: (hidden * hidden.max().item(),))
    for step in range(8):
        got, wanted = steps.run(step)
        assert torch.equal(got, wanted)
    assert steps.graphs.num_replays > 0


def test_a_result_that_happens_to_be_there_from_before_is_not_taken_for_computed(caplog):
    out = torch.zeros(3, 1)

    def finish(hidden):
        out.numpy()[:] = 3.0  # not captured, and the same in every step
        return (out,)

    run_and_count_warnings(steps := Steps(lambda ids, *_: ids.float()[:, None], finish=finish), caplog)
    assert "computes something else" in caplog.text
    steps.run(6)
    assert steps.graphs.num_replays == 1, "of the forward"
    assert sum(steps.graphs._memory._num_results.values()) == 1, "the graph that was dropped holds nothing"


def test_results_of_one_graph_lie_where_those_of_another_did():
    def copied(x):
        copy(x, out := x.new_empty(x.shape))
        return out

    graphs = CpuCallGraphs(forward := lambda ids, *_: copied(ids.float())[:, None])
    for num_tokens in range(1, 9):
        steps = Steps(forward, num_tokens, lambda hidden: (copied(hidden),), graphs)
        for step in range(4):
            got, wanted = steps.run(step)
            assert torch.equal(got, wanted)
    assert graphs.num_replays == 8
    assert len(graphs._memory._blocks) == 2, "of hidden states, and of what is made of them"
