"""What serving.py asks of a server, asked of a Runtime in this process: the same prompts, so many at a time.

A runtime for each concurrency, which computes no more than that at once. A concurrency of 1 is streamed, one
request after another, for its time to the first token, by a runtime like the server's, which computes up to
--max-num-seqs; others are one call of generate().
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from loads import HEADER, Answered, Asked, line, request_options, summary, workload

from lamina import Runtime, SamplingParams


def main() -> None:
    """Print a line a concurrency, and write JSON where --output says."""
    options = _parser().parse_args()
    document = {"date": time.strftime("%Y-%m-%d"), "label": options.label, "model": str(options.folder)}
    rows: list[dict[str, object]] = []
    print(HEADER, flush=True)
    for concurrency in options.concurrency:
        with _open(options, concurrency) as runtime:
            for seed in (options.seed + 1, options.seed + 2):  # kernels and graphs are there then
                warm = argparse.Namespace(**{**vars(options), "seed": seed, "requests": concurrency})
                _answer(runtime, concurrency, workload(warm, "concurrency", concurrency))
            asked = workload(options, "concurrency", concurrency)
            answered, seconds = _answer(runtime, concurrency, asked)
        figures = summary(answered, seconds, options.slo_first, options.slo_between)
        rows.append({"concurrency": concurrency} | figures)
        print(line("concurrency", concurrency, rows[-1]), flush=True)
        if options.output:
            options.output.write_text(json.dumps(document | {"loads": rows}, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = request_options(__doc__)
    parser.add_argument("folder", type=Path, help="as made_up_model.py writes it")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="where requests are streamed")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--memory-fraction", type=float, default=0.85)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cache-dir")
    return parser


def _open(options: argparse.Namespace, concurrency: int) -> Runtime:
    return Runtime.from_pretrained(
        options.folder,
        load_format="dummy",
        device=options.device,
        max_num_seqs=options.max_num_seqs if concurrency == 1 else concurrency,
        max_model_len=options.max_model_len,
        memory_fraction=options.memory_fraction,
        cache_dir=options.cache_dir,
    )


def _answer(runtime: Runtime, concurrency: int, asked: Sequence[Asked]) -> tuple[list[Answered], float]:
    params = [SamplingParams(max_tokens=one.max_tokens, temperature=0.0, ignore_eos=True) for one in asked]
    started = time.monotonic()
    if concurrency == 1:
        answered = [_streamed(runtime, one, own) for one, own in zip(asked, params, strict=True)]
        return answered, time.monotonic() - started
    outputs = runtime.generate([one.prompt for one in asked], params)
    seconds = time.monotonic() - started
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    return [Answered(arrivals=[seconds], num_tokens=length, seconds=seconds) for length in lengths], seconds


def _streamed(runtime: Runtime, one: Asked, params: SamplingParams) -> Answered:
    answer, begun = Answered(), time.monotonic()
    for delta in runtime.stream(one.prompt, params):
        answer.arrivals.append(time.monotonic() - begun)
        answer.num_tokens += len(delta.token_ids)
    answer.seconds = time.monotonic() - begun
    return answer


if __name__ == "__main__":
    main()
