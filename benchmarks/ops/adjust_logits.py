"""lamina::adjust_logits on the CPU beside its formula: a form, then penalties, for two vocabularies."""

import measure
import torch
from torch import Tensor

from lamina.custom_ops._shared.registry import select

WHAT = {  # allowed ids, penalties, tokens so far
    "a form": (True, (1.0, 0.0, 0.0), 500),
    "penalties, 500 tokens": (False, (1.1, 0.2, 0.1), 500),
    "penalties, 16000 tokens": (False, (1.1, 0.2, 0.1), 16000),
}


def arguments(name: str, num_rows: int, num_ids: int) -> tuple[Tensor | int, ...]:
    """Those of the op, whose bytes are mostly the logits read and the scores written."""
    has_form, penalties, length = WHAT[name]
    words = num_ids // 32 if has_form else 0
    every = torch.arange(num_rows)
    ids = torch.randint(num_ids, (num_rows, length), dtype=torch.int32)
    return (
        *((torch.randn(num_rows, num_ids) * 3).bfloat16(), every, ids, every),
        *(torch.full((num_rows,), length), ids[:, -1].contiguous(), every.int()),
        *(
            torch.full((num_rows,), length // 2).int(),
            torch.tensor(penalties).repeat(num_rows, 1).T.contiguous(),
        ),
        *(torch.empty(num_rows, 0, dtype=torch.int32), torch.empty(num_rows, 0)),
        torch.randint(-(2**31), 2**31, (num_rows, words)).int(),
        *(torch.empty(num_rows, 0, 0, dtype=torch.int32), torch.empty(num_rows, 0, dtype=torch.int32)),
        *(torch.ones(num_rows), num_ids, torch.empty(num_rows, num_ids), torch.empty(num_rows, 0, 2)),
    )


def run_case(name: str, num_rows: int, num_ids: int, rounds: int) -> dict:
    """Times of one call, and the bytes of logits and scores."""
    given = arguments(name, num_rows, num_ids)
    contenders = {}
    for provider in ("cpu", "numpy", "reference"):
        call = select(
            "adjust_logits", device=torch.device("cpu"), dtype=torch.bfloat16, provider=provider
        ).call
        contenders[provider] = lambda call=call: call(*given)
    times = measure.race(contenders, rounds)
    label = f"{name}, {num_rows} rows of {num_ids} ids"
    return {"name": label, "bytes": num_rows * num_ids * 6, "microseconds": times}


def main() -> None:
    options = measure.arguments("adjust_logits")
    cases = [
        run_case(name, num_rows, num_ids, options.rounds)
        for name in WHAT
        for num_ids in (49152, 131072)
        for num_rows in (1, 64)
    ]
    measure.report("adjust_logits", options, cases)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
