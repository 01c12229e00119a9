"""Random layers of attention as a capture sees them: rotations that can move into it, and look-alikes."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, fx

from lamina import custom_ops
from lamina.compiler.capture.capture import NUM_TOKENS, POSITIONS, TOKEN_IDS, Captured, capture
from lamina.compiler.torch_internals import torch_compat
from lamina.custom_ops.paged_attention.reference import dense_attention
from lamina.custom_ops.rotary_embedding.reference import rotary_embedding as formula

CPU = torch.device("cpu")
SITE = "lamina::attention_site"
HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 2, 8, 20
WIDTH = HEADS * HEAD_DIM
Attend = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What a layer has at hand: qkv [T, heads, D] in one tensor, angles [T, D / 2] of two kinds, attend."""

    qkv: Tensor
    cos: Tensor
    sin: Tensor
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], None]

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.qkv[:, :HEADS], self.qkv[:, HEADS:-KV_HEADS], self.qkv[:, -KV_HEADS:]

    def rotated(self) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.parts()
        return *custom_ops.rotary_embedding(query, key, self.cos, self.sin), value

    def finish(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(query.shape)
        self.attend(query, key, value, out)
        return out


def plain(layer: Layer) -> Tensor:
    return layer.finish(*layer.rotated())


def of_parts_apart(layer: Layer) -> Tensor:
    """Query and key are tensors of their own, and something is computed between rotation and attention."""
    query, key, value = (part.clone() for part in layer.parts())
    query, key = custom_ops.rotary_embedding(query, key, layer.cos, layer.sin)
    out = query.new_empty((query.shape[0], HEADS, HEAD_DIM))
    layer.attend(query, key, value, out)
    return out


def by_other_angles(layer: Layer) -> Tensor:
    query, key, value = layer.parts()
    return layer.finish(*custom_ops.rotary_embedding(query, key, layer.sin, layer.cos), value)


SITES = (plain, of_parts_apart, by_other_angles)


def not_rotated(layer: Layer) -> Tensor:
    return layer.finish(*layer.parts())


def by_the_formula(layer: Layer) -> Tensor:
    query, key, value = layer.parts()
    return layer.finish(*formula(query, key, layer.cos, layer.sin), value)


def key_rotated_otherwise(layer: Layer) -> Tensor:
    query, key, value = layer.rotated()
    _, key = custom_ops.rotary_embedding(query, layer.parts()[1], layer.sin, layer.cos)
    return layer.finish(query, key, value)


def key_left_alone(layer: Layer) -> Tensor:
    query, key, value = layer.parts()
    return layer.finish(custom_ops.rotary_embedding(query, key, layer.cos, layer.sin)[0], key, value)


def key_for_value(layer: Layer) -> Tensor:
    query, key, _ = layer.rotated()
    return layer.finish(query, key, key)


def key_read_again(layer: Layer) -> Tensor:
    query, key, value = layer.rotated()
    out = layer.finish(query, key, value)
    return out + key.repeat_interleave(HEADS // KV_HEADS, 1)


def query_read_again(layer: Layer) -> Tensor:
    query, key, value = layer.rotated()
    return layer.finish(query, key, value) + query


def query_scaled(layer: Layer) -> Tensor:
    query, key, value = layer.rotated()
    return layer.finish(query * 2, key, value)


def query_for_output(layer: Layer) -> Tensor:
    query, key, value = layer.rotated()
    layer.attend(query, key, value, query)
    return query


def output_as_the_query_lies(layer: Layer) -> Tensor:
    query, key, value = layer.rotated()
    out = torch.empty_like(query)
    layer.attend(query, key, value, out)
    return out


def source_written_in_between(layer: Layer) -> Tensor:
    query, key, value = layer.rotated()
    layer.qkv.mul_(2)
    return layer.finish(query, key, value)


def source_assigned_in_between(layer: Layer) -> Tensor:
    query, key, value = layer.rotated()
    layer.parts()[0][:] = 1.0
    return layer.finish(query, key, value)


def rotated_twice(layer: Layer) -> Tensor:
    """Only the second rotation is attention's own."""
    query, key, value = layer.rotated()
    return layer.finish(*custom_ops.rotary_embedding(query, key, layer.cos, layer.sin), value)


def heads_of_one_size_swapped(layer: Layer) -> Tensor:
    query, key, value = layer.rotated()
    return layer.finish(key.repeat_interleave(HEADS // KV_HEADS, 1), query[:, :KV_HEADS], value)


DECOYS = (
    *(not_rotated, by_the_formula, key_rotated_otherwise, key_left_alone, key_for_value, key_read_again),
    *(query_read_again, query_scaled, query_for_output, output_as_the_query_lies),
    *(source_written_in_between, source_assigned_in_between, heads_of_one_size_swapped),
)
BODIES = {body.__name__: body for body in (*SITES, rotated_twice, *DECOYS)}
NUM_SITES = {body.__name__: 1 for body in (*SITES, rotated_twice)}


@dataclass(frozen=True, kw_only=True)
class AttentionProgram:
    """Layers one after another, by the names of their bodies."""

    layers: tuple[str, ...]
    dtype: torch.dtype

    @property
    def num_sites(self) -> int:
        return sum(NUM_SITES.get(name, 0) for name in self.layers)

    def weights(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        angles = torch.rand(64, HEAD_DIM // 2, generator=generator) * 50
        names = [f"qkv.{index}" for index in range(len(self.layers))]
        weights = {name: random((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH) for name in names}
        return weights | {"table": random(VOCABULARY, WIDTH), "cos": angles.cos(), "sin": angles.sin()}

    def forward(self, weights: Any, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = F.embedding(ids, weights["table"])
        cos, sin = (weights[name].index_select(0, positions) for name in ("cos", "sin"))
        for index, name in enumerate(self.layers):
            qkv = F.linear(x, weights[f"qkv.{index}"]).view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM)
            layer = Layer(qkv=qkv, cos=cos, sin=sin, attend=functools.partial(attend, index))
            x = x + BODIES[name](layer).flatten(1)
        return x


@functools.lru_cache(maxsize=64)
def capture_program(program: AttentionProgram) -> Captured:
    """The program's graph, with its attention marked."""
    parameters = {name: (tuple(w.shape), w.dtype) for name, w in program.weights().items()}
    return capture(program.forward, torch_compat.fake_tensors(parameters, CPU), CPU)


def attend(
    layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, cos: Any = None, sin: Any = None
) -> None:
    """Attention over the whole sequence, of what is rotated or still to be rotated."""
    if cos is not None:
        q, k = formula(q, k, cos, sin)
    out.copy_(dense_attention(q, k, v, HEAD_DIM**-0.5))


class WithAttention(fx.Interpreter):
    """Runs a captured graph with attention where the marker stands."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if torch_compat.op_name(target) == SITE:
            return attend(args[4], *args[:4], *args[5:])
        return super().call_function(target, args, kwargs)


def run(program: AttentionProgram, graph: fx.Graph, num_tokens: int) -> Tensor:
    """What a captured graph computes of a sequence."""
    captured = capture_program(program)
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(VOCABULARY, (num_tokens,), generator=generator, dtype=torch.int32)
    positions = torch.arange(num_tokens, dtype=torch.int32) + 5
    known = program.weights() | {TOKEN_IDS: ids, POSITIONS: positions, NUM_TOKENS: num_tokens}
    inputs = [known[captured.inputs[node.name]] for node in graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        (result,) = WithAttention(fx.GraphModule(captured.graph, graph)).run(*inputs)
    assert isinstance(result, Tensor)
    return result


attention_programs = st.builds(
    AttentionProgram,
    layers=st.lists(
        st.one_of(st.sampled_from([body.__name__ for body in SITES]), st.sampled_from(sorted(BODIES))),
        min_size=1,
        max_size=3,
    ).map(tuple),
    dtype=st.sampled_from((torch.bfloat16, torch.float32)),
)
