"""An answer that never says the same three tokens again: python examples/logits_processor.py MODEL."""

import sys
from collections.abc import Sequence

from torch import Tensor

from lamina import Runtime, SamplingParams


def no_three_again(prompt: Sequence[int], answer: Sequence[int], logits: Tensor) -> Tensor:
    """Excludes what would complete three tokens that stand somewhere in prompt or answer already."""
    said = [*prompt, *answer]
    newest = tuple(said[-2:])
    for first, second, third in zip(said, said[1:], said[2:], strict=False):
        if (first, second) == newest:
            logits[third] = float("-inf")
    return logits


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with Runtime.from_pretrained(sys.argv[1]) as runtime:
        for processors in ([], [no_three_again]):
            params = SamplingParams(max_tokens=60, temperature=0, logits_processors=processors)
            print(runtime.generate("A list of colours: red, blue, red, blue,", params)[0].text)


if __name__ == "__main__":
    main()
