"""Instruction sets of the CPU: whoever builds code for them first does not build a library for each."""

import shutil

from torch._inductor import cpu_vec_isa

from lamina.compiler.torch_internals import torch_compat

COMPILER = shutil.which("g++") or "g++"


def test_a_compiler_is_asked_for_all_flags_at_once():
    assert torch_compat.takes_flags(COMPILER, ("-O1", "-Wall"))
    assert not torch_compat.takes_flags(COMPILER, ("-O1", "-mno-such-set"))
    assert not torch_compat.takes_flags("/no/such/compiler", ("-O1",))


def test_sets_that_a_cpu_has_are_found_without_a_library(tmp_path):
    """What torch found once it keeps: so it is asked beneath that."""
    with torch_compat._building_in(tmp_path):
        assert all(one.check_build("no code") for one in cpu_vec_isa.valid_vec_isa_list())
    assert not list(tmp_path.rglob("*.so"))


def test_a_set_whose_flags_the_compiler_refuses_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_compat, "takes_flags", lambda compiler, flags: False)
    with torch_compat._building_in(tmp_path):
        assert not cpu_vec_isa.VecAVX2().check_build("no code")
    assert cpu_vec_isa.VecISA.check_build is not torch_compat._has_flags
