"""Providers in Triton: found by name, imported only when chosen, missed with a remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lamina.common.errors import KernelBuildError
from lamina.custom_ops.triton_provider import triton_provider

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_missing_triton_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "lamina.custom_ops.rms_norm._triton", raising=False)
    with pytest.raises(KernelBuildError, match="pip install triton"):
        triton_provider("rms_norm").load()


def test_a_missing_kernel_is_no_missing_triton() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_op"):
        triton_provider("no_such_op").load()


def test_importing_the_ops_does_not_import_their_triton_kernels() -> None:
    code = "import sys, lamina.custom_ops; assert not any(name.endswith('._triton') for name in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
