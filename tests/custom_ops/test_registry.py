"""Which provider serves an op, and what is said about it."""

import logging
import subprocess
import sys

import pytest
import torch

from lamina.common.errors import KernelBuildError, UnsupportedError
from lamina.custom_ops._shared import registry
from lamina.custom_ops._shared.library import direct_call

CPU = torch.device("cpu")


def provider(name: str, error: str | None = None) -> registry.Provider:
    def load() -> registry.Call:
        if error is not None:
            raise KernelBuildError(error)
        return lambda x: (name, x)

    return registry.Provider(name=name, load=load, devices=frozenset({"cpu"}))


@pytest.fixture
def op(request: pytest.FixtureRequest) -> str:
    """An op of this test alone, with a kernel that does not build and a formula that does."""
    name = f"op_of_{request.node.name}"
    broken = provider("kernel", error="no C++ compiler")
    registry.register(name, check=lambda x: None, providers=(broken, provider("reference")))
    return name


def test_auto_falls_back_and_says_why_in_one_line(op: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        chosen = [registry.select(op, device=CPU, dtype=torch.float32) for _ in range(3)]
    assert [x.call(5) for x in chosen] == [("reference", 5)] * 3
    assert [record.getMessage() for record in caplog.records] == [
        f"{op} on cpu torch.float32: reference (no C++ compiler)"
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_an_explicit_provider_that_does_not_build_raises(op: str) -> None:
    with pytest.raises(KernelBuildError, match="no C\\+\\+ compiler"):
        registry.select(op, device=CPU, dtype=torch.float32, provider="kernel")


def test_an_explicit_provider_that_cannot_run_raises(op: str) -> None:
    with pytest.raises(UnsupportedError, match="reference does not run on cuda; use provider 'auto'"):
        registry.select(op, device=torch.device("cuda"), dtype=torch.float32, provider="reference")


def test_unknown_names_are_refused_with_the_known_ones(op: str) -> None:
    with pytest.raises(UnsupportedError, match="wanted auto, kernel, reference"):
        registry.select(op, device=CPU, dtype=torch.float32, provider="magic")
    with pytest.raises(UnsupportedError, match="paged_attention"):
        registry.providers("no_such_op")


def test_auto_without_any_provider_for_the_device_is_refused(op: str) -> None:
    with pytest.raises(UnsupportedError, match="none of kernel, reference runs on cuda"):
        registry.select(op, device=torch.device("cuda"), dtype=torch.float32)


def test_no_op_imports_dynamo_or_inductor() -> None:
    program = """
import sys, torch
before = set(sys.modules)
from lamina.custom_ops import *
from lamina.custom_ops._shared.registry import _ops
i = lambda *values: torch.tensor(values, dtype=torch.int32)
x, w, q, table = torch.ones(2, 8), torch.ones(8), torch.ones(2, 2, 4), torch.ones(2, 2)
cache = torch.zeros(2, 4, 2, 4)
linear(x, torch.ones(4, 8)); rms_norm(x, w, 1e-5); add_rms_norm(x, x, w, 1e-5); silu_and_mul(x)
rotary_embedding(q, q, table, table); write_kv_cache(q, q, cache, cache, i(4, 5))
paged_attention(q.clone(), q, cache, cache, i(1)[None], i(2), i(0, 2), 2, 0.5, -1, -1, 0.0)
heavy = (["torch", "_dynamo"], ["torch", "_inductor"])
new = {name for name in set(sys.modules) - before if name.split(".")[:2] in heavy}
assert not new, sorted(new)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_calls_of_an_op_go_where_they_are_forced_to_and_back() -> None:
    x, weight = torch.randn(2, 8), torch.randn(8)
    nowhere = registry.forced({"rms_norm": "fpga"})
    with (
        pytest.raises(UnsupportedError, match="rms_norm has no provider 'fpga'; wanted cuda, triton"),
        nowhere,
    ):
        raise AssertionError("not reached")
    direct = direct_call("rms_norm", x.device)
    right = direct(x, weight, 1e-5)
    with registry.forced({"rms_norm": "cuda"}):
        for call in (torch.ops.lamina.rms_norm.default, direct):
            with pytest.raises(UnsupportedError, match="cuda does not run on cpu"):
                call(x, weight, 1e-5)
        with registry.forced({"rms_norm": "reference"}):
            assert torch.equal(torch.ops.lamina.rms_norm.default(x, weight, 1e-5), right)
        with pytest.raises(UnsupportedError, match="cuda does not run on cpu"):
            direct(x, weight, 1e-5)
    assert torch.equal(direct(x, weight, 1e-5), right)
