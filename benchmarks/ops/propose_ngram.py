"""lamina::propose_ngram beside its formula, on histories without a match and with one at their beginning."""

import measure
import torch

from lamina.custom_ops._shared.registry import select

BLOCK_SIZE, K, NGRAM = 16, 3, (2, 8)


def run_case(num_rows: int, length: int, is_found: bool, rounds: int) -> dict:
    """Times of one proposal; each token of a row is read once, and its block's number."""
    blocks = -(-length // BLOCK_SIZE)
    known = torch.arange(num_rows * blocks * BLOCK_SIZE, dtype=torch.int32)
    tables = known[: num_rows * blocks].view(num_rows, blocks).contiguous()
    if is_found:
        known.view(num_rows, -1)[:, length - 9 : length] = known.view(num_rows, -1)[:, :9].clone()
    lengths = torch.full((num_rows,), length - 1, dtype=torch.int32)
    newest = known.view(num_rows, -1)[:, length - 1].contiguous()
    out = torch.empty(num_rows, K, dtype=torch.int32)
    arguments = (known.view(-1, BLOCK_SIZE), tables, lengths, newest, *NGRAM, out)
    contenders = {}
    for provider in ("cpu", "reference"):
        call = select("propose_ngram", device=torch.device("cpu"), dtype=torch.int32, provider=provider).call
        contenders[provider] = lambda call=call: call(*arguments)
    name = f"{num_rows} rows of {length}, {'found' if is_found else 'not found'}"
    return {
        "name": name,
        "bytes": 4 * num_rows * (length + blocks),
        "microseconds": measure.race(contenders, rounds),
    }


def main() -> None:
    options = measure.arguments("propose_ngram")
    sizes = [(1, 1024), (1, 16384), (8, 1024)]
    cases = [run_case(*size, found, options.rounds * 5) for size in sizes for found in (False, True)]
    measure.report("propose_ngram", options, cases)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
