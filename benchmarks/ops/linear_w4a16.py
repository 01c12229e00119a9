"""lamina::linear_w4a16 beside linear_int8 and torch's GEMM in bfloat16, for a step of a small model."""

import measure
import torch
import torch.nn.functional as F
from linear_int8 import NUM_LAYERS, SHAPES, VOCAB

from lamina.custom_ops import linear_int8, linear_w4a16

GROUP = 64
FOURS = tuple[torch.Tensor, torch.Tensor]


def four_bits(shape: tuple[int, int]) -> FOURS:
    """Random weights and their scales."""
    rows, columns = shape
    weight = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    return weight, torch.rand(rows, columns // GROUP).bfloat16()


def run_case(num_tokens: int, rounds: int) -> dict:
    """All GEMMs of a step; bytes are those of the weights in four bits, and of their scales."""
    layers = [list(SHAPES) for _ in range(NUM_LAYERS)] + [[(VOCAB, 576)]]
    fours = [four_bits(shape) for layer in layers for shape in layer]
    eights = [
        (torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[0]))
        for layer in layers
        for shape in layer
    ]
    dense = [weight.bfloat16() for weight, _ in eights]
    inputs = {columns: torch.randn(num_tokens, columns).bfloat16() for columns in (576, 1536)}

    def ours() -> None:
        for weight, scale in fours:
            linear_w4a16(inputs[weight.shape[1] * 2], weight, scale, None, None, GROUP)

    def in_int8() -> None:
        for weight, scale in eights:
            linear_int8(inputs[weight.shape[1]], weight, scale)

    def torchs() -> None:
        for weight in dense:
            F.linear(inputs[weight.shape[1]], weight)

    contenders = {"linear_w4a16": ours, "linear_int8": in_int8, "torch in bfloat16": torchs}
    times = measure.race(contenders, rounds)
    size = sum(weight.nbytes + scale.nbytes for weight, scale in fours)
    return {"name": f"a step of {num_tokens} tokens", "bytes": size, "microseconds": times}


def main() -> None:
    options = measure.arguments("linear_w4a16")
    cases = [run_case(count, options.rounds) for count in (1, 2, 4, 8, 16, 32, 128)]
    measure.report("linear_w4a16", options, cases)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
