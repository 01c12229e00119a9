"""Where a model's checkpoint lies, once it is here."""

from pathlib import Path

import torch

from ...common.progress import Progress
from ...common.store import Store
from ...models.checkpoints.gguf import config_of_gguf
from ...models.checkpoints.quantized import gguf_blocks
from ...models.checkpoints.source import resolve_source
from ..config import RuntimeConfig
from .resolve import resolve_dtype


def find_folder(config: RuntimeConfig, store: Store, device: torch.device, progress: Progress) -> Path:
    """The checkpoint's folder; dummy weights need no more of it than its config."""
    progress("config", 0.0, str(config.model))
    folder = Path(config.model).expanduser()
    if config.load_format == "dummy" and folder.is_dir():
        return folder
    dtype = resolve_dtype(config.dtype, torch.bfloat16, device)
    # a GGUF file's blocks are read as they lie, where nothing else is asked for
    kept_as = None if config.quantization is not None else gguf_blocks.kept_as(device)
    if config.load_format == "dummy" and folder.is_file() and folder.suffix.lower() == ".gguf":
        return config_of_gguf(folder, store, dtype=dtype, kept_as=kept_as)
    return resolve_source(
        config.model,
        store=store,
        revision=config.revision,
        token=config.token,
        dtype=dtype,
        progress=progress,
        needs_tokenizer=config.tokenizer is None,
        kept_as=kept_as,
    )
