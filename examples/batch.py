"""Several prompts at once, each with its own parameters: python examples/batch.py MODEL."""

import sys

from lamina import Runtime, SamplingParams


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    prompts = ["The capital of France is", "A haiku about rain:", "1, 2, 3, 4,"]
    params = [
        SamplingParams(max_tokens=16, temperature=0),
        SamplingParams(max_tokens=32, temperature=0.8, top_p=0.95, seed=1),
        SamplingParams(max_tokens=16, temperature=0, stop="9"),
    ]
    with Runtime.from_pretrained(sys.argv[1]) as runtime:
        for output in runtime.generate(prompts, params):
            print(f"{output.prompt!r} -> {output.text!r} ({output.outputs[0].finish_reason})")


if __name__ == "__main__":
    main()
