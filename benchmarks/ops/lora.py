"""lamina::lora beside its formula and beside copying what it is given, layer after layer of a small model."""

import measure
import torch

from lamina.custom_ops._shared.registry import select

NUM_LAYERS, NUM_SLOTS, RANK = 30, 8, 16
SHAPES = (((576, 192, 192), 576), ((576,), 576), ((1536, 1536), 576), ((576,), 1536))  # SmolLM2's projections


def layer() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...], int]]:
    """a, b, scales, rows and columns of each projection."""
    return [
        (
            torch.randn(NUM_SLOTS, len(rows) * RANK, columns).bfloat16(),
            torch.randn(NUM_SLOTS, sum(rows), RANK).bfloat16(),
            torch.ones(NUM_SLOTS, len(rows)),
            rows,
            columns,
        )
        for rows, columns in SHAPES
    ]


def run_case(num_tokens: int, rounds: int) -> dict:
    """A step whose tokens use all slots in turn; bytes are those of the slots that are in use."""
    layers = [layer() for _ in range(NUM_LAYERS)]
    slots = (torch.arange(num_tokens) % NUM_SLOTS).int()
    x = {columns: torch.randn(num_tokens, columns).bfloat16() for columns in (576, 1536)}
    y = {sum(rows): torch.randn(num_tokens, sum(rows)).bfloat16() for rows, _ in SHAPES}

    def by(provider: str):
        call = select("lora", device=torch.device("cpu"), dtype=torch.bfloat16, provider=provider).call

        def run() -> None:
            for own in layers:
                for a, b, scales, rows, columns in own:
                    call(y[sum(rows)], x[columns], a, b, scales, slots, rows)

        return run

    def copy() -> None:
        for _ in layers:
            for rows, _columns in SHAPES:
                y[sum(rows)].clone()

    times = measure.race({"cpu": by("cpu"), "reference": by("reference"), "copy": copy}, rounds)
    size = sum(
        (a.nbytes + b.nbytes) * min(num_tokens, NUM_SLOTS) // NUM_SLOTS for own in layers for a, b, *_ in own
    )
    return {"name": f"a step of {num_tokens} tokens", "bytes": size, "microseconds": times}


def main() -> None:
    options = measure.arguments("lora")
    cases = [run_case(count, options.rounds) for count in (1, 8, 32, 128)]
    measure.report("lora", options, cases)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
