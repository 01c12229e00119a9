"""Tiny models that make vectors, classes or scores, saved by the libraries that they are compared with."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from .families import SIZES

with warnings.catch_warnings():  # of what it imports, none of them about this
    warnings.simplefilter("ignore")
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore
    from sentence_transformers.sentence_transformer.modules import Pooling

TEXTS = ("hello world", "a", "the " * 40, "He said: hello, the world!", "x" * 90, "hello world again")
POOLINGS = {"last": "lasttoken", "mean": "mean", "cls": "cls"}


def save_model(folder: Path, kind: str, tokenizer: Any, *, prefix: str = "Llama", **changes: Any) -> Path:
    """A model of random weights and its tokenizer; kind: what its architecture ends with."""
    config = getattr(transformers, f"{prefix}Config")(**SIZES | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{prefix}{kind}")(config).float()
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def plain(tokenizer: Any) -> Any:
    """The tokenizer without a chat template, by which sentence-transformers would write every text."""
    tokenizer.chat_template = None
    return tokenizer


def save_embedder(
    folder: Path,
    tokenizer: Any,
    pooling: str = "mean",
    *,
    normalize: bool = True,
    dense: Sequence[int] = (),
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> Path:
    """An embedder as sentence-transformers saves one; dense: sizes that vectors are projected to."""
    base = save_model(folder / "base", "Model", tokenizer, **changes or {})
    transformer = quietly(Transformer, str(base))
    size = transformer.get_embedding_dimension()
    modules = [transformer, Pooling(size, POOLINGS[pooling])]
    for out in dense:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(out)
            modules.append(Dense(size, out))
        size = out
    if normalize:
        modules.append(Normalize())
    model = quietly(SentenceTransformer, modules=modules, device="cpu", **options)
    model.save_pretrained(str(folder / "saved"))
    return folder / "saved"


def save_reranker(folder: Path, tokenizer: Any) -> Path:
    """A language model whose logits of two tokens score a pair, as sentence-transformers saves one."""
    base = save_model(folder / "base", "ForCausalLM", tokenizer)
    transformer = quietly(Transformer, str(base), transformer_task="text-generation")
    modules = [transformer, LogitScore(true_token_id=70, false_token_id=90)]
    model = quietly(CrossEncoder, modules=modules, device="cpu")
    model.save_pretrained(str(folder / "saved"))
    return folder / "saved"


def embedder_of(folder: Path) -> Any:
    """sentence-transformers' own model of a folder."""
    return quietly(SentenceTransformer, str(folder), device="cpu")


def cross_encoder_of(folder: Path) -> Any:
    """sentence-transformers' own model of pairs of a folder."""
    return quietly(CrossEncoder, str(folder), device="cpu")


def quietly(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What a function returns; what it warns of is its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def edit(path: Path, **values: Any) -> None:
    """Set values of a JSON object in a file; None takes one out."""
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
