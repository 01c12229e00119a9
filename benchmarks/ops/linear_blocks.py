"""lamina::linear_blocks beside int8 and torch's GEMM in bfloat16, for steps of a small model."""

import measure
import torch
import torch.nn.functional as F
from linear_int8 import NUM_LAYERS, SHAPES, VOCAB

from lamina.custom_ops import linear_blocks, linear_int8
from lamina.custom_ops.linear_blocks.layout import KINDS

KINDS_HERE = ("Q4_0", "Q4_1", "Q8_0")  # of 32 columns, of which 576 are whole blocks


def run_case(num_tokens: int, rounds: int) -> dict:
    """All GEMMs of a step; bytes are those of the weights in Q4_1."""
    shapes = [*(shape for _ in range(NUM_LAYERS) for shape in SHAPES), (VOCAB, 576)]
    blocks = {
        kind: [
            torch.randint(0, 48, (rows, KINDS[kind].row_bytes(columns)), dtype=torch.uint8)
            for rows, columns in shapes
        ]
        for kind in KINDS_HERE
    }
    eights = [(torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[0])) for shape in shapes]
    dense = [weight.bfloat16() for weight, _ in eights]
    inputs = {columns: torch.randn(num_tokens, columns).bfloat16() for columns in (576, 1536)}

    def ours(kind: str) -> None:
        for weight in blocks[kind]:
            linear_blocks(inputs[KINDS[kind].num_columns(weight.shape[1])], weight, None, kind)

    def in_int8() -> None:
        for weight, scale in eights:
            linear_int8(inputs[weight.shape[1]], weight, scale)

    def torchs() -> None:
        for weight in dense:
            F.linear(inputs[weight.shape[1]], weight)

    contenders = {kind: lambda kind=kind: ours(kind) for kind in KINDS_HERE}
    contenders |= {"linear_int8": in_int8, "torch in bfloat16": torchs}
    size = sum(weight.nbytes for weight in blocks["Q4_1"])
    return {
        "name": f"a step of {num_tokens} tokens",
        "bytes": size,
        "microseconds": measure.race(contenders, rounds),
    }


def main() -> None:
    options = measure.arguments("linear_blocks")
    measure.report(
        "linear_blocks", options, [run_case(count, options.rounds) for count in (1, 2, 8, 32, 512)]
    )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
