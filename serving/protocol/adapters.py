"""Bodies of /v1/load_lora_adapter and /v1/unload_lora_adapter, by the names that vLLM gives their fields."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta

from .decoding import Body, Unserved

ONE_OF_A_NAME = Unserved(why="unload the adapter of that name first; leave it out", neutral=(False,))
Name = Annotated[str, Meta(min_length=1, max_length=256)]


class LoadAdapterRequest(Body, kw_only=True, frozen=True):
    """An adapter that requests may ask for by its name from now on."""

    unserved: ClassVar[Mapping[str, Unserved]] = {"load_inplace": ONE_OF_A_NAME}

    lora_name: Name
    """What requests call it, as their model."""
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """The folder, on the server's machine, that PEFT wrote."""


class UnloadAdapterRequest(Body, kw_only=True, frozen=True):
    """An adapter that no later request may ask for."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        "lora_int_id": Unserved(why="adapters have no numbers here; leave it out")
    }

    lora_name: Name
