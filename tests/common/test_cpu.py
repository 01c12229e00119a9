"""One sentence says which CPU code is made for, whoever makes it."""

import json

import pytest
import torch

from lamina.common import cpu
from lamina.compiler.codegen.inductor import piece_key
from lamina.compiler.torch_internals import torch_compat
from lamina.custom_ops._shared import build

INTEL = """processor\t: 0
model name\t: Some CPU
cpu MHz\t\t: 2100.000
flags\t\t: fpu avx512f avx512_bf16 amx_tile amx_bf16
processor\t: 1
model name\t: Some CPU
cpu MHz\t\t: 3400.000
flags\t\t: fpu avx512f avx512_bf16 amx_tile amx_bf16
"""


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(cpuinfo) -> the keys of a piece and of a native kernel on it."""

    def keys(text):
        path = tmp_path / "cpuinfo"
        path.write_text(text)
        found = cpu.instruction_set.__wrapped__(path)
        for module in (torch_compat, build):
            monkeypatch.setattr(module, "instruction_set", lambda: found)
        toolchain = torch_compat.toolchain(torch.device("cpu"))
        return piece_key("graph", {"toolchain": toolchain}), build._key("linear", build.CSRC)

    return keys


@pytest.mark.parametrize("feature", ["avx512_bf16", "amx_tile", "amx_bf16"])
def test_code_for_a_cpu_with_a_feature_is_not_found_on_one_without(machine, feature):
    both, neither = machine(INTEL), machine(INTEL.replace(f" {feature}", ""))
    assert both[0] != neither[0]
    assert both[1] != neither[1]


def test_what_changes_from_moment_to_moment_counts_for_neither(machine):
    assert machine(INTEL) == machine(INTEL.replace("2100", "800"))


def test_of_this_machine_there_is_something_to_say():
    assert cpu.instruction_set()
    assert "isa" in torch_compat.toolchain(torch.device("cpu"))
    assert json.dumps(cpu.instruction_set())
