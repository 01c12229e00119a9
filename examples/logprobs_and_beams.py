"""How likely answers, their tokens and a prompt are: python examples/logprobs_and_beams.py MODEL."""

import sys

from lamina import BeamSearchParams, Runtime, SamplingParams

PROMPT = "The capital of France is"


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with Runtime.from_pretrained(sys.argv[1]) as runtime:
        params = SamplingParams(n=2, best_of=5, temperature=0.8, seed=1, max_tokens=12, logprobs=2)
        for answer in runtime.generate(PROMPT, params)[0].outputs:
            print(f"{answer.cumulative_logprob:8.2f} {answer.text!r}")
            for token_id, entry in zip(answer.token_ids, answer.logprobs or (), strict=True):
                others = {report.decoded_token: round(report.logprob, 2) for report in entry.values()}
                print(f"{'':9}rank {entry[token_id].rank:<5} {others}")

        scored = runtime.generate(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
        entries = [entry for entry in scored.prompt_logprobs or () if entry is not None]
        total = sum(report.logprob for entry in entries for report in entry.values())
        print(f"{total:8.2f} {PROMPT!r}, the prompt itself")

        search = BeamSearchParams(beam_width=3, max_tokens=12)
        for answer in runtime.beam_search(PROMPT, search)[0].outputs:
            print(f"{answer.cumulative_logprob:8.2f} {answer.text!r}, by beam search")


if __name__ == "__main__":
    main()
