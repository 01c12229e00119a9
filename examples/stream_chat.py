"""One answer, printed as it is written: python examples/stream_chat.py MODEL QUESTION."""

import sys

from lamina import Runtime, SamplingParams


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    model, question = sys.argv[1:]
    with Runtime.from_pretrained(model) as runtime:
        messages = [{"role": "user", "content": question}]
        for delta in runtime.stream_chat(messages, SamplingParams(max_tokens=256)):
            print(delta.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
