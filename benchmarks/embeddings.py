"""Tokens a second of an embedder: Lamina beside sentence-transformers, or servers over HTTP, in turns.

Of a shape (1b, 8b) the weights are random, and Lamina is alone.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import workloads


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="1b, 8b, or a folder for both")
    parser.add_argument("--url", action="append", default=[], help="of a server, as NAME=http://host:port")
    parser.add_argument("--tokens", type=int, default=512, help="of a text")
    parser.add_argument("--texts", type=int, default=64, help="of a call")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pooling", default="auto")
    parser.add_argument("--vocab", type=int, default=1000, help="ids are drawn below this")
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def prompts_of(args: argparse.Namespace, lots: random.Random) -> list[list[int]]:
    """Token ids of the texts of a call, which no call before had."""
    return [[lots.randrange(3, args.vocab) for _ in range(args.tokens)] for _ in range(args.texts)]


def by_lamina(args: argparse.Namespace) -> tuple[Callable[[Any], None], Callable[[], None]]:
    """What embeds token ids, and its end."""
    from lamina import Runtime

    settings: dict[str, Any] = {"dtype": args.dtype, "device": args.device, "cache_dir": args.cache_dir}
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model in workloads.SHAPES:
            model = workloads.write_config(model, Path(folder) / model)
            settings["load_format"] = "dummy"
        runtime = Runtime.from_pretrained(model, pooling=args.pooling, max_model_len=args.tokens, **settings)

    def embed(prompts: list[list[int]]) -> None:
        runtime.embed(prompts)

    return embed, runtime.close


def by_sentence_transformers(args: argparse.Namespace) -> tuple[Callable[[Any], None], Callable[[], None]]:
    """The same by sentence-transformers' modules, which get the ids as they are."""
    import torch
    from sentence_transformers import SentenceTransformer

    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    model = SentenceTransformer(
        args.model, device=args.device, model_kwargs={"dtype": dtype} if dtype else {}
    )

    def embed(prompts: list[list[int]]) -> None:
        ids = torch.tensor(prompts, device=args.device)
        with torch.inference_mode():
            model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["sentence_embedding"].cpu()

    return embed, lambda: None


def by_server(url: str) -> tuple[Callable[[Any], None], Callable[[], None]]:
    """The same over HTTP, by any server of OpenAI's embeddings."""
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]

    def embed(prompts: list[list[int]]) -> None:
        body = json.dumps({"model": model, "input": prompts, "encoding_format": "base64"}).encode()
        request = urllib.request.Request(f"{url}/v1/embeddings", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            assert len(json.load(answer)["data"]) == len(prompts)

    return embed, lambda: None


def main() -> None:
    """Ask all contenders the same texts, in turns."""
    args = parse_args()
    lots = random.Random(0)
    if args.url:
        contenders = {name: by_server(url) for name, _, url in (each.partition("=") for each in args.url)}
    elif args.model in workloads.SHAPES:
        contenders = {"lamina": by_lamina(args)}
    else:
        contenders = {"lamina": by_lamina(args), "sentence-transformers": by_sentence_transformers(args)}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(args.repeats + 1):
        prompts = prompts_of(args, lots)
        for name, (embed, _) in contenders.items():
            started = time.perf_counter()
            embed(prompts)
            if repeat:  # the first warms up
                seconds[name].append(time.perf_counter() - started)
    for _, close in contenders.values():
        close()
    tokens = args.texts * args.tokens
    found = {
        name: {"tokens_per_second": tokens / statistics.median(times), "seconds": times}
        for name, times in seconds.items()
    }
    if args.json:
        print(json.dumps({"settings": vars(args), "found": found}, indent=2, default=str))
        return
    for name, figures in found.items():
        print(f"{name:24} {figures['tokens_per_second']:12.0f} tokens/s")


if __name__ == "__main__":
    main()
