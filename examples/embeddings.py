"""Find the text that is nearest to a question, by an embedder.

python examples/embeddings.py MODEL [last|mean|cls]
"""

import sys

from lamina import Runtime

TEXTS = ["The sky is blue.", "Grass is green.", "Two and two are four."]


def main() -> None:
    """Print texts and scores, the best first."""
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    model, *pooling = sys.argv[1:]
    settings = {"pooling": pooling[0]} if pooling else {}  # where the checkpoint does not say it
    with Runtime.from_pretrained(model, **settings) as runtime:
        for found in sorted(runtime.score("What is blue?", TEXTS), key=lambda each: -each.score):
            print(f"{found.score:7.4f}  {TEXTS[found.index]}")


if __name__ == "__main__":
    main()
