"""What tests of several engines share."""

from ..engine.conftest import own_temp

__all__ = ["own_temp"]
