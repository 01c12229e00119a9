"""CUDA providers pack as many arguments as the kernels' structs have, which else a GPU alone would show."""

import re
import struct

import pytest

from lamina.custom_ops._shared.build import CSRC

OPS = CSRC.parent / "custom_ops"
LAYOUT = re.compile(r'CudaKernel\(\s*(?:op|"\w+"),\s*"(\w+)"(?:, source_of\(dtype\))?\)\s*# struct (\w+)')
SOURCES = {path.parent.name: path.read_text() for path in sorted(OPS.glob("*/_cuda.py"))}
PACKED = [(op, *found) for op, source in SOURCES.items() for found in LAYOUT.findall(source)]
WORDS = {
    "lamina::AdaptersBehind": 5,
    "lamina::GemmConfig": 6,
    "GemmConfig": 6,
    "RankPointers": 8,
}  # of 8 bytes


def num_words(body: str) -> int:
    """Members of a struct of 8 bytes each, with those of a struct in it."""
    lines = [line.partition("//")[0].strip() for line in body.splitlines()]
    members = [member.strip() for member in " ".join(lines).split(";") if member.strip()]
    return sum(WORDS.get(member.split()[0], 1) * (member.count(",") + 1) for member in members)


def struct_of(name: str) -> str:
    """The body of the one struct of that name in csrc."""
    wanted = re.compile(rf"struct {name} {{\n(.*?)\n}};", re.DOTALL)
    sources = [path.read_text() for path in [*CSRC.glob("*/*.cu*")]]
    found = {body for source in sources for body in wanted.findall(source)}
    assert len(found) == 1, name
    return found.pop()


def test_most_providers_say_what_they_pack() -> None:
    assert len(PACKED) >= 12
    assert {"linear", "linear_w8a8", "scaled_linear"} <= {op for op, *_ in PACKED}


@pytest.mark.parametrize("op, layout, name", PACKED, ids=[name for *_, name in PACKED])
def test_a_struct_has_as_many_words_as_are_packed(op: str, layout: str, name: str) -> None:
    packed = struct.Struct(f"{layout}q").size // 8  # the stream, which is added, comes last
    assert packed == num_words(struct_of(name)), op
