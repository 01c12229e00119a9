"""lamina::sample on the CPU beside its formula, over a vocabulary of 49152 ids."""

import measure
import torch

from lamina.custom_ops._shared.registry import select

VOCABULARY = 49152
SETTINGS = {  # temperature, top_k, top_p
    "greedy": (0.0, 0, 1.0),
    "temperature": (1.0, 0, 1.0),
    "top-k 50, top-p 0.9": (1.0, 50, 0.9),
    "top-p 0.9": (1.0, 0, 0.9),
}


def run_case(name: str, num_rows: int, dtype: torch.dtype, rounds: int) -> dict:
    """Times of one call; its bytes are those of the logits."""
    temperature, top_k, top_p = SETTINGS[name]
    logits = (torch.randn(num_rows, VOCABULARY) * 3).to(dtype)
    arguments = (
        *(logits, torch.full((num_rows,), temperature), torch.full((num_rows,), top_k, dtype=torch.int32)),
        *(torch.full((num_rows,), top_p), torch.zeros(num_rows)),
        *(torch.arange(num_rows), torch.arange(num_rows)),
        *(torch.empty(num_rows, 0, dtype=torch.int32), VOCABULARY, torch.empty(num_rows, dtype=torch.int32)),
    )
    contenders = {}
    for provider in ("cpu", "numpy", "reference"):
        call = select("sample", device=torch.device("cpu"), dtype=dtype, provider=provider).call
        contenders[provider] = lambda call=call: call(*arguments)
    times = measure.race(contenders, rounds)
    label = f"{name}, {num_rows} rows {str(dtype).removeprefix('torch.')}"
    return {"name": label, "bytes": logits.nbytes, "microseconds": times}


def main() -> None:
    options = measure.arguments("sample")
    cases = [
        run_case(name, num_rows, torch.bfloat16, options.rounds)
        for name in SETTINGS
        for num_rows in (1, 8, 32)
    ]
    measure.report("sample", options, cases)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
