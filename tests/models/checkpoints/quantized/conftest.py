"""What tests of checkpoints that are quantized already share."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def source(make_tiny_folder: Callable[..., Path]) -> Path:
    """A TINY model as it is before a writer quantizes it."""
    return make_tiny_folder()
