"""lamina::linear_w8a8, quantization included, on a CPU beside torch's GEMM in bfloat16, layer after layer."""

import measure
import torch
import torch.nn.functional as F

from lamina.custom_ops import linear_w8a8

NUM_LAYERS = 30
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # SmolLM2's: qkv, o, gate and up, down


def run_case(num_tokens: int, rounds: int) -> dict:
    """All GEMMs of a step but the LM head's; bytes are those of the weights in one byte each."""
    dense = [torch.randn(shape).bfloat16() for _ in range(NUM_LAYERS) for shape in SHAPES]
    quantized = [(weight.to(torch.float8_e4m3fn), torch.rand(weight.shape[0])) for weight in dense]
    inputs = {columns: torch.randn(num_tokens, columns).bfloat16() for columns in (576, 1536)}

    def ours() -> None:
        for weight, scale in quantized:
            linear_w8a8(inputs[weight.shape[1]], weight, scale)

    def torchs() -> None:
        for weight in dense:
            F.linear(inputs[weight.shape[1]], weight)

    times = measure.race({"linear_w8a8": ours, "torch in bfloat16": torchs}, rounds)
    size = sum(weight.numel() for weight in dense)
    return {"name": f"a step of {num_tokens} tokens", "bytes": size, "microseconds": times}


def main() -> None:
    options = measure.arguments("scaled_linear")
    cases = [run_case(count, options.rounds) for count in (1, 2, 8, 16, 32, 128)]
    measure.report("scaled_linear", options, cases)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
