"""Providers written in Triton; the package is imported only when one of them is chosen."""

import importlib
from typing import Any

from ...common.errors import KernelBuildError
from .registry import Call, Provider
from .triton_cache import listen


def triton_provider(op: str, **limits: Any) -> Provider:
    """The function of the op's name in custom_ops/<op>/_triton.py, for CUDA devices with or without nvcc."""

    def load() -> Call:
        try:
            module = importlib.import_module(f"..{op}._triton", __package__)
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise KernelBuildError("triton is not installed; pip install triton") from error
        listen()
        call: Call = getattr(module, op)
        return call

    return Provider(name="triton", load=load, devices=frozenset({"cuda"}), **limits)
