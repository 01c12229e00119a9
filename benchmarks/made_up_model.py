"""A model that is made up: the config of a shape, and a tokenizer each token of which is text of its own.

With it a server of any engine answers over HTTP without a checkpoint: `made_up_model.py SHAPE FOLDER`, then
the server with random weights (`--load-format dummy`, for Lamina as for vLLM).
"""

import argparse
import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path

import workloads
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NUM_RESERVED = 256  # the last ids: tokens that are no text, the first two of which begin and end one
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_model(shape: str, folder: Path) -> Path:
    """Write config, tokenizer and chat template of a shape, and return the folder."""
    workloads.write_config(shape, folder)
    size = workloads.SHAPES[shape]["vocab_size"]
    texts = list(itertools.islice(_texts(), size - NUM_RESERVED))
    reserved = [f"<|{number}|>" for number in range(NUM_RESERVED)]
    vocabulary = {text: number for number, text in enumerate([*texts, *reserved])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in reserved])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": reserved[0], "eos_token": reserved[1], "chat_template": TEMPLATE}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "config.json").write_text(
        json.dumps(
            workloads.COMMON
            | workloads.SHAPES[shape]
            | {"bos_token_id": vocabulary[reserved[0]], "eos_token_id": vocabulary[reserved[1]]}
        )
    )
    return folder


def _texts() -> Iterator[str]:
    """Every byte first, so that any text has tokens; then words, half of which begin with a space."""
    yield from sorted(pre_tokenizers.ByteLevel.alphabet())
    for length in itertools.count(2):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            word = "".join(letters)
            yield word
            yield f"\u0120{word}"


def main() -> None:
    """Write the model of a shape to a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=workloads.SHAPES)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    print(write_model(options.shape, options.folder))


if __name__ == "__main__":
    main()
