"""lamina::add_rms_norm_linear on the CPU beside the ops it stands for, at the shapes of SmolLM2-135M."""

from functools import partial

import measure
import torch
from linear import POOL_BYTES, SHAPES, in_turn
from torch import Tensor

from lamina.custom_ops.add_rms_norm_linear import _composed, _cpu
from lamina.custom_ops.linear._cpu import methods

ROWS = (1, 8, 32, 512)


def run_case(name: str, num_rows: int, dtype: torch.dtype, rounds: int) -> dict:
    """Times of one call; its bytes are those of the weight."""
    rows, columns = SHAPES[name]
    weight = torch.randn(rows, columns).to(dtype) / columns**0.5
    x, residual = (torch.randn(num_rows, columns).to(dtype) for _ in range(2))
    size = weight.numel() * weight.element_size()
    weights = [weight.clone() for _ in range(max(2, POOL_BYTES // size))]
    norm = x, residual, torch.ones(columns, dtype=dtype), 1e-5
    is_gated = name == "gate_up"

    def composed(weight: Tensor) -> object:
        return _composed.add_rms_norm_linear(*norm, weight, None, is_gated)

    contenders = {"one after another": in_turn(composed, weights)}
    for method in methods(dtype, 1):
        launch = partial(_cpu.launch, bias=None, silu_and_mul=is_gated, method=method)
        contenders[method.value] = in_turn(
            lambda weight, launch=launch: launch(*norm, weight=weight), weights
        )
    times = measure.race(contenders, rounds)
    label = f"{name} {num_rows} rows {str(dtype).removeprefix('torch.')}"
    return {"name": label, "bytes": size, "microseconds": times}


def main() -> None:
    options = measure.arguments("add_rms_norm_linear")
    cases = [
        run_case(name, num_rows, dtype, options.rounds)
        for dtype in (torch.bfloat16, torch.float32)
        for name in ("qkv", "gate_up")
        for num_rows in ROWS
    ]
    measure.report("add_rms_norm_linear", options, cases)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
