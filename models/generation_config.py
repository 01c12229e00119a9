"""What a checkpoint's generation_config.json says, checked: how its author wants tokens chosen."""

import os
from dataclasses import dataclass
from pathlib import Path

from .fields import Fields, read_json


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """What a checkpoint's author wants for sampling; None where nothing is said."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None


def read_generation_config(folder: Path) -> GenerationDefaults:
    """The sampling defaults of a checkpoint folder, empty where it has none."""
    path = folder / "generation_config.json"
    if not os.path.lexists(path):
        return GenerationDefaults()
    fields = Fields(read_json(path), str(path))
    return GenerationDefaults(
        eos_token_ids=fields.token_ids("eos_token_id"),
        temperature=fields.number("temperature", None, maximum=3e38),
        top_k=fields.integer("top_k", None, minimum=-1),
        top_p=fields.number("top_p", None, positive=True, maximum=1),
        min_p=fields.number("min_p", None, maximum=1),
        typical_p=fields.number("typical_p", None, positive=True, maximum=1),
        repetition_penalty=fields.number("repetition_penalty", None, minimum=1e-30, maximum=1e30),
    )
