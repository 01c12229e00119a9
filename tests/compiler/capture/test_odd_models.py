"""Models written as nobody here writes them: what they compute is kept, or what they do refused by name."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from lamina.common.errors import CompileError
from lamina.compiler.capture.capture import NUM_TOKENS, POSITIONS, TOKEN_IDS, capture
from lamina.compiler.capture.split import AttentionCall, split
from lamina.compiler.compile import Program, compile_program
from lamina.compiler.config import CompileConfig
from lamina.compiler.execution.plan import ALIGNMENT
from lamina.compiler.inspect import verify
from lamina.compiler.inspect.op_by_op import OpByOp
from lamina.compiler.inspect.samples import sample_arguments
from lamina.compiler.passes import pipeline
from lamina.compiler.torch_internals import torch_compat
from lamina.custom_ops.paged_attention.reference import dense_attention
from lamina.models import ParameterSpec
from lamina.models.layers import EXACT_OPS
from lamina.models.quantization.model_schemes import ModelSchemes

from ..tiny import CPU

H, WIDTH, VOCABULARY = 2, 16, 10
PASSES = pipeline.select(None, "fast")


def weights_of(dtype=torch.float32, **shapes):
    generator = torch.Generator().manual_seed(0)
    shapes = {"table": (VOCABULARY, WIDTH), "norm": (WIDTH,), "o": (WIDTH, WIDTH)} | shapes
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def attend(layer, q, k, v, out, *angles):
    assert not angles
    out.copy_(dense_attention(q, k, v, (1 + layer) * 0.3))


def tokens(num_tokens):
    return torch.arange(num_tokens, dtype=torch.int32) % VOCABULARY, torch.arange(
        num_tokens, dtype=torch.int32
    )


def site(attend, layer, x):
    """Attention of a layer over x, by all heads alike."""
    q = x.view(-1, H, WIDTH // H)
    out = torch.empty_like(q)
    attend(layer, q, q, q, out)
    return out.flatten(1)


def capture_of(forward, weights):
    table = {name: (tuple(weight.shape), weight.dtype) for name, weight in weights.items()}
    return capture(forward, torch_compat.fake_tensors(table, CPU), CPU)


class Pieces:
    """A model in pieces, each after AOT and every pass, to be run op by op."""

    def __init__(self, forward, weights, folder):
        captured = capture_of(forward, weights)
        self.weights, self.model = weights, split(captured.graph, captured.inputs)
        self.rewritten = [verify.pass_stages(p.graph, PASSES, folder)[-1][1] for p in self.model.pieces]

    def call(self, number):
        """What stands for a piece's compiled code; memory holds whatever it held."""
        return lambda arguments: OpByOp(fx.GraphModule({}, self.rewritten[number]), fill=7.0).run(*arguments)

    def run(self, num_tokens):
        ids, positions = tokens(num_tokens)
        values = {**self.weights, TOKEN_IDS: ids, POSITIONS: positions, NUM_TOKENS: num_tokens}
        numbers = iter(range(len(self.rewritten)))
        for call in self.model.calls:
            inputs = [values[name] for name in (call.tensors if is_attend(call) else call.inputs)]
            if is_attend(call):
                attend(call.layer, *inputs)
            else:
                values |= dict(zip(call.outputs, self.call(next(numbers))(inputs), strict=True))
        return values[self.model.result]


def is_attend(call):
    return isinstance(call, AttentionCall)


def eagerly(forward, weights, num_tokens):
    with torch.no_grad():
        return forward(weights, *tokens(num_tokens), attend)


def embedded(weights, ids):
    return F.embedding(ids, weights["table"])


def updates_the_residual(weights, ids, positions, attend):
    x = embedded(weights, ids)
    x += site(attend, 0, x)
    x.mul_(2).add_(1)
    y = x
    y += site(attend, 1, x)
    return F.silu(y) + x


def updates_by_method_and_item(weights, ids, positions, attend):
    x, kept = embedded(weights, ids), embedded(weights, ids) + 1
    x = x + site(attend, 0, x)
    kept[:, 0] = kept[:, 1] + 3
    kept.copy_(kept + x)
    kept.clamp_(-1, 1)
    return kept * 2


def updates_out_of_attention(weights, ids, positions, attend):
    q = embedded(weights, ids).view(-1, H, WIDTH // H)
    out = torch.empty_like(q)
    attend(0, q, q, q, out)
    out *= 0.5
    F.relu(out, inplace=True)
    torch.add(out, 1.0, out=out)
    return site(attend, 1, out.flatten(1))


def updates_before_the_cut(weights, ids, positions, attend):
    x = embedded(weights, ids)
    x *= 2
    before = x + 0
    x += site(attend, 0, x)
    return before + x


def counts_tokens_behind_a_cut(weights, ids, positions, attend):
    x = embedded(weights, ids)
    twice = torch.cat([x, x]).size(0)
    half, shape = x.shape[0] * 3 + 1, x.shape
    x = x + site(attend, 0, x)
    x = x.reshape(shape) / half
    return x * twice + site(attend, 1, x) * (twice - half)


def one_buffer_for_two_layers(weights, ids, positions, attend):
    q = embedded(weights, ids).view(-1, H, WIDTH // H)
    both = q.new_empty(q.shape[0], 2 * H, WIDTH // H)
    attend(0, q, q, q, both[:, :H])
    attend(1, q, q, q, both[:, H:])
    return both.flatten(1)


def output_seen_through_a_view(weights, ids, positions, attend):
    q = embedded(weights, ids).view(-1, H, WIDTH // H)
    out = q.new_empty(q.shape[0], WIDTH).view(-1, H, WIDTH // H)
    attend(0, q, q, q, out)
    return out.flatten(1) + 1


def infinities_across_a_cut(weights, ids, positions, attend):
    x = embedded(weights, ids)
    mask = torch.where(x > 0, 0.0, float("-inf"))
    y = site(attend, 0, x)
    return torch.softmax(y + mask, -1).nan_to_num(0.0)


def a_scalar_across_a_cut(weights, ids, positions, attend):
    x = embedded(weights, ids)
    largest = x.abs().amax()
    return site(attend, 0, x) / largest


def a_piece_without_weights(weights, ids, positions, attend):
    x = embedded(weights, ids)
    for layer in range(3):
        x = site(attend, layer, torch.tanh(x)) + positions[:, None] % 3
    return x


ZOO = [
    updates_the_residual,
    updates_by_method_and_item,
    updates_out_of_attention,
    updates_before_the_cut,
    counts_tokens_behind_a_cut,
    one_buffer_for_two_layers,
    output_seen_through_a_view,
    infinities_across_a_cut,
    a_scalar_across_a_cut,
    a_piece_without_weights,
]


@pytest.mark.parametrize("forward", ZOO, ids=lambda forward: forward.__name__)
def test_an_odd_model_computes_what_it_says_and_its_pieces_are_found_right(forward, tmp_path):
    pieces = Pieces(forward, weights_of(), tmp_path)
    with torch.no_grad():
        for num_tokens in (1, 2, 7):
            expected = eagerly(forward, weights_of(), num_tokens)
            torch.testing.assert_close(pieces.run(num_tokens), expected)
    for number, piece in enumerate(pieces.model.pieces):
        verify.require_right(
            piece.graph, pieces.call(number), PASSES, "fast", CPU, tmp_path, lambda passes: None
        )


def compiled(forward, weights, store, **settings):
    program = Program(
        forward=forward,
        parameters={name: (tuple(weight.shape), weight.dtype) for name, weight in weights.items()},
        key={},
        sources=(Path(__file__),),
        device=CPU,
    )
    return compile_program(program, CompileConfig(**settings), "fast", store).plan.bind(weights, CPU)


def everything_odd(weights, ids, positions, attend):
    x = updates_the_residual(weights, ids, positions, attend)
    q = x.view(-1, H, WIDTH // H)
    both = q.new_empty(q.shape[0], 2 * H, WIDTH // H)
    mask, twice = torch.where(x > 0, 0.0, float("-inf")), torch.cat([x, x]).size(0)
    attend(2, q, q, q, both[:, :H])
    attend(3, q, q, q, both[:, H:])
    both *= 0.5
    return torch.softmax(both.flatten(1)[:, :WIDTH] + mask, -1).nan_to_num(0.0) * twice


def test_compiled_and_checked_an_odd_model_computes_what_it_says(store):
    weights = weights_of()
    plan = compiled(everything_odd, weights, store)
    for num_tokens in (1, 7):
        torch.testing.assert_close(
            plan(*tokens(num_tokens), attend), eagerly(everything_odd, weights, num_tokens)
        )


def refused(number):
    def forward(weights, ids, positions, attend):
        x = embedded(weights, ids)
        q = x.view(-1, H, WIDTH // H)
        out = torch.empty_like(q)
        for layer in number:
            attend(layer, q, q, q, out)
        return out.flatten(1)

    return forward


def returns_a_weight(weights, ids, positions, attend):
    site(attend, 0, embedded(weights, ids))
    return weights["norm"]


def writes_into_a_weight(weights, ids, positions, attend):
    y = site(attend, 0, embedded(weights, ids))
    weights["norm"].add_(1)
    return y * weights["norm"]


def writes_into_positions(weights, ids, positions, attend):
    y = site(attend, 0, embedded(weights, ids))
    positions += 1
    return y * positions[:, None]


def writes_into_what_another_view_shows(weights, ids, positions, attend):
    x = embedded(weights, ids) * 2
    row = x[:, 0]
    x = x.mul_(site(attend, 0, x))
    return x + row[:, None]


REFUSED = [
    (refused([0, 0]), "attend is called twice with layer 0"),
    (refused([0, -1]), "attend is called with layer -1"),
    (returns_a_weight, "must compute what it returns; it returns norm"),
    (writes_into_a_weight, "writes into a weight or an input of the model"),
    (writes_into_positions, "writes into a weight or an input of the model"),
    (writes_into_what_another_view_shows, "is a view of across an attention call"),
]


@pytest.mark.parametrize("forward, message", REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_kept_is_refused_by_name(forward, message):
    def cut():
        captured = capture_of(forward, weights_of())
        return split(captured.graph, captured.inputs)

    with pytest.raises(CompileError, match=message):
        cut()


def test_weights_that_lie_over_each_other_are_still_distinguished():
    def forward(weights, ids, positions, attend):
        x = embedded(weights, ids)
        for name in ("a", "b", "c"):
            x = F.linear(x, weights[name])
        return site(attend, 0, x)

    captured = capture_of(forward, weights_of(a=(WIDTH, WIDTH), b=(WIDTH, WIDTH), c=(WIDTH, WIDTH)))
    tensors = [value for value in sample_arguments(captured.graph, CPU) if isinstance(value, torch.Tensor)]
    arguments = [tensor for tensor in tensors if tensor.shape == (WIDTH, WIDTH)]
    assert len({value.untyped_storage().data_ptr() for value in arguments}) == 1
    assert all(value.data_ptr() % ALIGNMENT == 0 for value in arguments), "as kernels want it"
    assert all(not torch.equal(one, other) for one in arguments for other in arguments if one is not other)


def layer_norm_outside_ops(weights, ids, positions, attend):
    x = embedded(weights, ids)
    x = F.layer_norm(x, (WIDTH,), weights["norm"], None, 1e-5)
    return site(attend, 0, x)


def layer_norm_by_ops(weights, ids, positions, attend):
    x = embedded(weights, ids)
    return site(attend, 0, EXACT_OPS.layer_norm(x, weights["norm"], None, 1e-5))


@pytest.mark.parametrize(
    "forward, blamed",
    [
        (layer_norm_outside_ops, r"all that rounds goes through ops, and .*layer_norm.*does not"),
        (layer_norm_by_ops, "code generation makes it so"),
    ],
)
def test_in_exact_mode_calls_outside_ops_are_named_where_no_pass_is_to_blame(forward, blamed, tmp_path):
    """Code that is wrong with any passes: of calls that are not ours it need not have the bits."""
    exact = pipeline.select(None, "exact")
    captured = capture_of(forward, weights_of(torch.bfloat16))
    module = split(captured.graph, captured.inputs).pieces[0].graph

    def call(arguments):
        return tuple(result * 1.01 for result in OpByOp(module).run(*arguments))

    with pytest.raises(CompileError, match=f"(?s){blamed}"):
        verify.require_right(module, call, exact, "exact", CPU, tmp_path, lambda passes: call)


def names_of_inputs(weights, ids, positions, attend):
    x = embedded(weights, ids) * weights["token_ids"] + weights["positions"]
    return site(attend, 0, x) * weights["num_tokens"] + weights["norm_scale"]


def test_weights_may_be_named_as_inputs_and_scales_are(store):
    weights = weights_of(token_ids=(WIDTH,), positions=(WIDTH,), num_tokens=(WIDTH,), norm_scale=(WIDTH,))
    specs = {name: ParameterSpec(shape=(WIDTH,), sources=(name,)) for name in weights}
    assert ModelSchemes(specs=specs).join(weights) == weights
    plan = compiled(names_of_inputs, weights, store)
    torch.testing.assert_close(plan(*tokens(5), attend), eagerly(names_of_inputs, weights, 5))
    with pytest.raises(CompileError, match="a weight is named '%add'; wanted a name that does not begin"):
        capture_of(names_of_inputs, weights | {"%add": torch.ones(3)})
