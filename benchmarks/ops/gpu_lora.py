"""lamina::lora on one GPU: what the adapted projections of all layers add to a step, in one CUDA graph.

Bytes are the least that must move: matrices of the slots in use, and x, y and the result once. `behind GEMMs`
is what the first provider adds to the projections themselves, of which each is followed by it. `layers` are a
step's projections, norms and gates without adapters; with them, and norms and gates behind which nothing
begins early, as generated code has it; and with kernels of ours for those, as a plan has them (kernels),
likewise with the library's GEMM for gate and up, or with GEMMs of a stage less (roomy), beside which a
processor has shared memory for blocks that add adapters. `joined` are those of linear_lora: as it is, with
all stages (tight), with room for a single block a processor (single), or where the GEMM does not ask for the
adapters ahead (unasked).
What every call of a layer computes is compared first, with fresh numbers and in memory that held NaN.
"""

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_attention import copy_bandwidth, seconds
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from workloads import SHAPES

from lamina.custom_ops._shared.registry import select
from lamina.custom_ops.linear import choices
from lamina.custom_ops.linear_lora import _overlapped as overlapped
from lamina.custom_ops.lora.reference import lora as formula

RESULT = Path(__file__).resolve().parent.parent / "results" / "gpu_lora_op.json"
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
JOINED = "joined", "joined_tight", "joined_single", "joined_double", "joined_unasked"
FORMS = ("base", "generated", "kernels", "library", "roomy", *JOINED)
OPS, EPS = torch.ops.lamina, 1e-5
SUM_ERROR = 2e-6  # of sums in float32, by the sizes of their terms

Call = Callable[..., Tensor]


def projections(shape: str) -> list[tuple[tuple[int, ...], int]]:
    """Outputs of each part, and columns, of the projections of a layer."""
    sizes = SHAPES[shape]
    hidden, inner, width = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    query, key = sizes["num_attention_heads"] * width, sizes["num_key_value_heads"] * width
    return [((query, key, key), hidden), ((hidden,), query), ((inner, inner), hidden), ((hidden,), inner)]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE) / shape[-1] ** 0.5


def operands(shape: str, num_tokens: int, num_slots: int, rank: int) -> list[tuple[Any, ...]]:
    """The arguments of every call of a step, whose tokens have all slots in turn."""
    slots = torch.arange(num_tokens, device=DEVICE, dtype=torch.int32) % num_slots
    return [
        (
            *(random(num_tokens, sum(rows)), random(num_tokens, columns)),
            *(random(num_slots, len(rows) * rank, columns), random(num_slots, sum(rows), rank)),
            *(torch.ones(num_slots, len(rows), device=DEVICE), slots, rows),
        )
        for _ in range(SHAPES[shape]["num_hidden_layers"])
        for rows, columns in projections(shape)
    ]


def weights(shape: str) -> list[Tensor]:
    """The projections that the calls of a step are behind."""
    layers = range(SHAPES[shape]["num_hidden_layers"])
    return [random(sum(rows), columns) for _ in layers for rows, columns in projections(shape)]


def added_to_gemms(matrices: list[Tensor], given: list[tuple[Any, ...]], call: Call, repeats: int) -> float:
    """Milliseconds that a step's projections take longer with a call behind each."""
    linear, pairs = OPS.linear.default, list(zip(matrices, given, strict=True))
    alone: list[Call] = [lambda x=x, w=w: linear(x, w) for w, (_, x, *_) in pairs]
    both: list[Call] = [
        lambda x=x, w=w, rest=rest: call(linear(x, w), x, *rest) for w, (_, x, *rest) in pairs
    ]
    return (seconds(both, repeats) - seconds(alone, repeats)) * len(pairs) * 1e3


def layer_calls(
    form: str, shape: str, matrices: list[Tensor], given: list[tuple[Any, ...]]
) -> list[Callable[[], None]]:
    """A call for each layer, as one of FORMS has it; fixed rows stand in the place of attention."""
    hidden, (_, attended, *_) = SHAPES[shape]["hidden_size"], given[1]
    weight, state = random(hidden), [random(len(attended), hidden), random(len(attended), hidden)]
    linear = OPS.linear.default
    norm, gate = (provided(op, form) for op in ("add_rms_norm", "silu_and_mul"))
    gate_up_gemm = F.linear if form in ("generated", "library") else linear

    def added(place: int, x: Tensor, gemm: Any = linear) -> Any:
        if form.startswith("joined"):
            return OPS.linear_lora.default(x, matrices[place], None, *given[place][2:])
        y = gemm(x, matrices[place])
        return y if form == "base" else OPS.lora.default(y, x, *given[place][2:])

    def normed(place: int, x: Tensor) -> None:
        state[:] = norm(added(place, x), state[1], weight, EPS)

    def layer(first: int) -> None:
        added(first, state[0])
        if form == "base":
            gate_up = state[1], weight, EPS, matrices[first + 2], None, True
            result, state[1] = OPS.add_rms_norm_linear.default(
                linear(attended, matrices[first + 1]), *gate_up
            )
        else:
            normed(first + 1, attended)
            result = gate(added(first + 2, state[0], gate_up_gemm))
        normed(first + 3, result)

    return [lambda first=first: layer(first) for first in range(0, len(matrices), 4)]


@contextlib.contextmanager
def gemms_with_room(shape: str, num_tokens: int) -> Iterator[None]:
    """While it lasts, projections of so many tokens are served by their kernels with a stage less."""
    device_name, bucket = choices.device_name_of(DEVICE, DTYPE), choices.bucket_of(num_tokens)
    served = {}
    for rows, columns in projections(shape) if bucket else ():
        site = choices.Site(kind="linear", num_tokens=bucket, n=sum(rows), k=columns)
        config = choices.choose(site, device_name).kernel
        if isinstance(config, choices.GemmConfig) and config.stages > 2:
            served[site] = config

    def adopt(removed: int) -> None:
        kernels = {site: config._replace(stages=config.stages - removed) for site, config in served.items()}
        entries = [choices.Entry(site=s, kernel=k, microseconds=1, otherwise=2) for s, k in kernels.items()]
        choices.adopt(device_name, entries)

    adopt(1)
    try:
        yield
    finally:
        adopt(0)


@contextlib.contextmanager
def joined_as(**changed: Any) -> Iterator[None]:
    """While it lasts, linear_lora's module has other constants or functions."""
    before = {name: getattr(overlapped, name) for name in changed}
    for name, value in changed.items():
        setattr(overlapped, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(overlapped, name, value)


def setting_of(form: str, shape: str, num_tokens: int) -> contextlib.AbstractContextManager[None]:
    """What else is as a form has it."""
    if form == "roomy":
        return gemms_with_room(shape, num_tokens)
    if form == "joined_tight":
        return joined_as(leave_room=lambda config, room: config)
    if form == "joined_single":
        return joined_as(blocks_beside=lambda num_tokens, block: 1)
    if form == "joined_double":
        return joined_as(blocks_beside=lambda num_tokens, block: overlapped.MOST_ROOM // block)
    if form == "joined_unasked":
        return joined_as(PREFETCHES=False)
    return contextlib.nullcontext()


def provided(op: str, form: str) -> Any:
    """A norm or gate as a form has it; Triton's kernels begin late, as generated ones do."""
    return select(op, device=DEVICE, dtype=DTYPE, provider="triton" if form == "generated" else "auto").call


def check(given: list[tuple[Any, ...]], matrices: list[Tensor]) -> None:
    """AssertionError where a call of the first layer is not what formulas say, or joined has other bits."""
    for weight, (y, x, *rest, rows) in zip(matrices, given[:4], strict=False):
        apart = OPS.lora.default(OPS.linear.default(x, weight), x, *rest, rows)
        assert torch.equal(OPS.linear_lora.default(x, weight, None, *rest, rows), apart)
        plain = over_poison(OPS.lora.default, y, x, *rest, rows)
        a, b, scales, slots = rest
        wide = [one.double() for one in (y, x, a, b, scales)]
        exact, sizes = (formula(*each, slots, rows) for each in (wide, [one.abs() for one in wide]))
        allowed = exact.abs() * torch.finfo(DTYPE).eps / 2 + sizes * SUM_ERROR
        assert ((plain.double() - exact).abs() <= allowed).all(), f"lora of {list(rows)} outputs is wrong"


def over_poison(call: Call, *arguments: Any) -> Any:
    """What a call returns, in memory that held NaN."""
    for one in arguments[:2]:
        torch.full_like(one, torch.nan)
        torch.full_like(one[:, : one.shape[1] // 2], torch.nan)
    return call(*arguments)


def measure(
    shape: str, num_tokens: int, matrices: list[Tensor], options: argparse.Namespace
) -> dict[str, Any]:
    """Milliseconds of a step's calls by each provider."""
    given, used = operands(shape, num_tokens, options.slots, options.rank), min(num_tokens, options.slots)
    num_bytes = sum((a.nbytes + b.nbytes) * used // options.slots for _, _, a, b, *_ in given)
    check(given, matrices)
    row: dict[str, Any] = {"shape": shape, "tokens": num_tokens, "ms": {}, "layers_ms": {}}
    row["bytes"] = num_bytes + sum(2 * y.nbytes + x.nbytes for y, x, *_ in given)
    for name in options.providers:
        call = select("lora", device=DEVICE, dtype=DTYPE, provider=name).call
        calls: list[Any] = [lambda one=one, call=call: call(*one) for one in given]
        row["ms"][name] = seconds(calls, options.repeats) * len(given) * 1e3
    first = select("lora", device=DEVICE, dtype=DTYPE, provider=options.providers[0]).call
    row["behind_gemms_ms"] = added_to_gemms(matrices, given, first, options.repeats)
    for form in FORMS:
        with setting_of(form, shape, num_tokens):
            calls = layer_calls(form, shape, matrices, given)
            row["layers_ms"][form] = seconds(calls, options.repeats) * len(calls) * 1e3
    return row


def main() -> None:
    """Print a line a size as it is known, then write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=["8b", "1b"], choices=SHAPES)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 32, 128, 512])
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--providers", nargs="*", default=["cuda", "triton"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no other size is begun")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    ends, bandwidth, rows = time.perf_counter() + options.seconds, copy_bandwidth(), []
    for shape in options.shapes:
        matrices = weights(shape)
        for num_tokens in options.tokens:
            if time.perf_counter() > ends:
                break
            rows.append(measure(shape, num_tokens, matrices, options))
            floor = rows[-1]["bytes"] / bandwidth * 1e3
            cells = "   ".join(f"{name} {taken:7.3f}" for name, taken in rows[-1]["ms"].items())
            cells += f"   behind GEMMs {rows[-1]['behind_gemms_ms']:7.3f}"
            cells += "   layers: " + " ".join(f"{k} {v:.3f}" for k, v in rows[-1]["layers_ms"].items())
            print(f"{shape} {num_tokens:4} tokens   ms a step: {cells}   bytes {floor:7.3f}", flush=True)
    facts = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "bandwidth": bandwidth}
    options.output.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
