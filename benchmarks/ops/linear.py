"""lamina::linear on the CPU beside torch's GEMMs, plain and prepacked, for the shapes of SmolLM2-135M."""

import itertools
from collections.abc import Callable
from functools import partial

import measure
import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.custom_ops.linear import _cpu
from lamina.custom_ops.linear.choices import Method

SHAPES = {
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "head": (49152, 576),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 512)
MOST_HEAD_ROWS = 64  # the head sees one row a sequence
POOL_BYTES = 200 << 20  # of weights that calls go through: a step reads all of a model's once


def in_turn(call: Callable[[Tensor], object], weights: list[Tensor]) -> Callable[[], object]:
    """A call that takes the next of the weights every time."""
    following = itertools.cycle(weights)
    return lambda: call(next(following))


def run_case(name: str, num_rows: int, dtype: torch.dtype, rounds: int) -> dict:
    """Times of one GEMM; its bytes are those of the weight."""
    rows, columns = SHAPES[name]
    weight = torch.randn(rows, columns).to(dtype) / columns**0.5
    x = torch.randn(num_rows, columns).to(dtype)
    size = weight.numel() * weight.element_size()
    weights = [weight.clone() for _ in range(max(2, POOL_BYTES // size))]
    contenders = {"torch": in_turn(partial(F.linear, x), weights)}
    if dtype == torch.bfloat16:
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, num_rows) for weight in weights]
        contenders["torch, prepacked"] = in_turn(
            lambda weight: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""), packed
        )
    for method in dict.fromkeys((*_cpu.methods(dtype, 1), Method.DOT)):
        contenders[method.value] = in_turn(
            lambda weight, method=method: _cpu.launch(x, weight, None, method), weights
        )
    times = measure.race(contenders, rounds)
    label = f"{name} [{rows}, {columns}] {num_rows} rows {str(dtype).removeprefix('torch.')}"
    return {"name": label, "bytes": size, "microseconds": times}


def main() -> None:
    options = measure.arguments("linear")
    cases = [
        run_case(name, num_rows, dtype, options.rounds)
        for dtype in (torch.bfloat16, torch.float32)
        for name in SHAPES
        for num_rows in ROWS
        if name != "head" or num_rows <= MOST_HEAD_ROWS
    ]
    measure.report("linear", options, cases)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
