"""lamina::linear_int8 beside torch's GEMM in bfloat16, layer after layer of a small model."""

import measure
import torch
import torch.nn.functional as F

from lamina.custom_ops import linear_int8

NUM_LAYERS, VOCAB = 30, 49152
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # SmolLM2's: qkv, o, gate and up, down


def weights() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Of every layer, and of the LM head, so that no weight is met again before all others have been."""
    layers = [list(SHAPES) for _ in range(NUM_LAYERS)] + [[(VOCAB, 576)]]
    return [
        [(torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[0])) for shape in layer]
        for layer in layers
    ]


def run_case(num_tokens: int, rounds: int) -> dict:
    """All GEMMs of a step; bytes are those of the weights in one byte each."""
    quantized = weights()
    dense = [[weight.bfloat16() for weight, _ in layer] for layer in quantized]
    inputs = {columns: torch.randn(num_tokens, columns).bfloat16() for columns in (576, 1536)}

    def ours() -> None:
        for layer in quantized:
            for weight, scale in layer:
                linear_int8(inputs[weight.shape[1]], weight, scale)

    def torchs() -> None:
        for layer in dense:
            for weight in layer:
                F.linear(inputs[weight.shape[1]], weight)

    times = measure.race({"linear_int8": ours, "torch in bfloat16": torchs}, rounds)
    size = sum(weight.numel() for layer in quantized for weight, _ in layer)
    return {"name": f"a step of {num_tokens} tokens", "bytes": size, "microseconds": times}


def main() -> None:
    options = measure.arguments("linear_int8")
    cases = [run_case(count, options.rounds) for count in (1, 2, 8, 16, 32, 128)]
    measure.report("linear_int8", options, cases)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
