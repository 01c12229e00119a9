"""What verifying drafts costs and gains on one GPU: tokens a second with scripted acceptance, beside without.

Weights are random, so no drafter could be right. Whether a draft holds is drawn for its row and position
instead: the given share of each, one after another, as far as the first that does not. Steps do all that they
do otherwise, but for drafting, which costs next to nothing here.
"""

import argparse
import functools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import workloads
from gpu import describe_machine
from torch import Tensor

from lamina import NGram, Runtime, SamplingParams
from lamina.runtime.startup import builder
from lamina.runtime.worker.draft_batch import DraftRows
from lamina.runtime.worker.drafter import DraftInput
from lamina.runtime.worker.input_batch import BatchView
from lamina.runtime.worker.speculator import Speculator, Verdict

RESULT = Path(__file__).resolve().parent / "results" / "gpu_speculation.json"
PROMPT = 64
MAX_SEQS, MAX_MODEL_LEN = 256, 2048
WANTED = {1: 2.2, 8: 2.0, 32: 1.6}


class AnyDrafter:
    """Drafts the newest token again and again."""

    wants_aux: tuple[int, ...] = ()

    def propose(self, step: DraftInput, draft_ids: Tensor) -> None:
        """See Drafter."""
        if step.num_drafts:
            draft_ids.copy_(step.newest.clamp(min=0).unsqueeze(1).expand_as(draft_ids))


def hold_by_lot(share: float) -> Any:
    """A verdict by a draw for each row and position, in place of what was sampled."""

    @functools.cache
    def lots_on(device: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.rand(MAX_SEQS, MAX_MODEL_LEN, generator=generator).to(device)

    def judge(
        self: Speculator,
        batch: BatchView,
        rows: DraftRows,
        sampled: Tensor,
        before: Tensor,
        most: Tensor,
        verdict: Verdict,
    ) -> None:
        positions = batch.sample_positions[before]
        lots = lots_on(positions.device)[: len(before)].gather(
            1, positions.clamp(0, MAX_MODEL_LEN - 1).long()
        )
        is_own = self._places[: rows.most_drafts] < rows.num_drafts.unsqueeze(1)
        is_draft = is_own & (positions < most.unsqueeze(1))
        holds = is_draft & (lots < share)
        torch.sum(holds.to(torch.int32).cumprod(1), 1, dtype=torch.int32, out=verdict.accepted)
        torch.sum(is_draft, 1, dtype=torch.int32, out=verdict.drafted)

    return judge


def main() -> None:
    """Print a line a batch, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", nargs="?", default="8b")
    parser.add_argument("--batches", type=int, nargs="+", default=list(WANTED))
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.7, help="of drafts that hold")
    parser.add_argument("--tokens", type=int, default=384, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cache-dir")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    builder.new_drafter = lambda resolved: AnyDrafter() if resolved.config.speculative else None
    Speculator._judge = hold_by_lot(options.share)  # type: ignore[method-assign]
    document: dict[str, Any] = {"machine": describe_machine(), "k": options.k, "share": options.share}
    plain, drafting = (open_runtime(options, k) for k in (0, options.k))
    with plain, drafting:
        for batch in options.batches:
            found = document[f"batch {batch}"] = compare(plain, drafting, batch, options)
            print(f"batch {batch}: {json.dumps(found)}; wanted {WANTED.get(batch)}", flush=True)
            options.output.write_text(json.dumps(document, indent=1) + "\n")


def open_runtime(options: argparse.Namespace, k: int) -> Runtime:
    """A shape with random weights, and as many drafts as said."""
    folder = workloads.write_config(options.shape, Path("/tmp/lamina-shapes") / options.shape)
    most = max(options.batches)
    started = time.perf_counter()
    runtime = Runtime.from_pretrained(
        folder,
        load_format="dummy",
        dtype="bfloat16",
        device=options.device,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=most,
        num_kv_blocks=most * 16 + 64,
        prefix_cache=False,
        speculative=NGram(k=k) if k else None,
        cache_dir=options.cache_dir,
    )
    print(f"k {k}: ready in {time.perf_counter() - started:.1f} s", flush=True)
    return runtime


def compare(plain: Runtime, drafting: Runtime, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of both by turns, their ratio, and what became of drafts."""
    rates: dict[str, list[float]] = {"plain": [], "drafting": []}
    runtimes = {"plain": plain, "drafting": drafting}
    for repeat in range(options.repeats + 1):
        for name, runtime in runtimes.items():
            rate = tokens_a_second(runtime, batch, options.tokens)
            if repeat:
                rates[name].append(rate)
    ratios = [b / a for a, b in zip(rates["plain"], rates["drafting"], strict=True)]
    medians = {name: round(statistics.median(found), 1) for name, found in rates.items()}
    graphs = drafting.stats()["cuda_graphs"]
    counts = {"eager_steps": graphs["eager_steps"], **drafting.stats()["speculation"]}
    return {**medians, "ratio": round(statistics.median(ratios), 3), "ratios": ratios, **counts}


def tokens_a_second(runtime: Runtime, batch: int, num_tokens: int) -> float:
    """Of so many requests at once, from when all have their first token."""
    prompts = [[3 + (7 * row + 3 * column) % 900 for column in range(PROMPT)] for row in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = runtime.generate(prompts, params)
    began = max(output.times.first_token for output in outputs)
    ended = max(output.times.finished for output in outputs)
    return batch * (num_tokens - 1) / (ended - began)


if __name__ == "__main__":
    main()
