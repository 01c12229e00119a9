"""What torch's code generator does wrong in some versions, put right while it runs."""

import contextlib
import importlib
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch


@contextlib.contextmanager
def in_force() -> Iterator[None]:
    """Every correction, for as long as code is generated."""
    with _hinted_sizes_count(), _roundings_stay():
        yield


@contextlib.contextmanager
def builds_are_whole() -> Iterator[None]:
    """Has a library take its name once it is whole, and a compiler keep its own files beside it.

    Inductor takes a file of that name for a finished one, also where the compiler was ended as it wrote.
    """
    from torch._inductor import cpp_builder

    run: Any = cpp_builder.run_compile_cmd

    def run_whole(cmd_line: str, cwd: str) -> None:
        _build_whole(run, cmd_line, cwd)

    with replaced(cpp_builder, run_compile_cmd=run_whole):
        yield


def _build_whole(run: Callable[[str, str], None], command: str, folder: str) -> None:
    """Run a compiler's command; what it makes appears by a rename."""
    words = shlex.split(command)
    if "-o" not in words:
        run(command, folder)
        return
    place = words.index("-o") + 1
    target, words[place] = words[place], words[place] + ".part"
    try:
        run(shlex.join(["env", f"TMPDIR={folder}", *words]), folder)
        os.replace(words[place], target)
    finally:
        Path(words[place]).unlink(missing_ok=True)


@contextlib.contextmanager
def every_read_is_guarded() -> Iterator[None]:
    """Has Dynamo guard what it takes for constant: globals of the standard library, imported modules, and the
    absence of a key in a dict where the model's code goes on without it."""
    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables import dicts

    item: Any = dicts.ConstDictVariable.getitem_const_raise_exception_if_absent

    def guarded_item(variable: Any, tx: Any, key: Any) -> Any:
        if variable.source:
            variable.install_dict_contains_guard(tx, [key])
        return item(variable, tx, key)

    truths = {"is_stdlib": lambda module: False, "_import_module": importlib.import_module}
    known = {name: truth for name, truth in truths.items() if hasattr(symbolic_convert, name)}
    with (
        replaced(symbolic_convert, **known),
        replaced(dicts.ConstDictVariable, getitem_const_raise_exception_if_absent=guarded_item),
    ):
        yield


@contextlib.contextmanager
def replaced(owner: Any, **replacements: Any) -> Iterator[None]:
    """Gives a class or module other attributes inside the block."""
    before = {name: owner.__dict__[name] for name in replacements if name in owner.__dict__}
    try:
        for name, value in replacements.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in replacements:
            if name in before:
                setattr(owner, name, before[name])
            elif name in owner.__dict__:
                delattr(owner, name)


@contextlib.contextmanager
def _hinted_sizes_count() -> Iterator[None]:
    """Has Inductor use the hint of an unbacked size as its size: else it would fuse nothing on CUDA."""
    from torch._inductor import graph, sizevars

    if hasattr(sizevars.SizeVarAllocator, "all_unbacked_explicitly_hinted"):
        yield
        return
    with replaced(graph.GraphLowering, get_dep_size_hint=_dependency_size):
        yield


def _dependency_size(graph: Any, dependency: Any, count_bytes: bool = True) -> int:
    """The hinted size of a dependency; every symbol of our graphs has a hint."""
    sizes: dict[Any, int] = graph.dep_size_hint_cache
    key = (dependency, count_bytes)
    if key not in sizes:
        sizes[key] = 0
        with contextlib.suppress(KeyError):  # a dependency on what is no buffer of the graph
            sizes[key] = dependency.numbytes_hint() if count_bytes else dependency.numel_hint()
    return sizes[key]


@contextlib.contextmanager
def _roundings_stay() -> Iterator[None]:
    """Keeps roundings between two conversions, which some versions drop though set to round as eager."""
    from torch._inductor.fx_passes import joint_graph

    if hasattr(joint_graph, "_is_lossless_fp_widening_cast"):  # it looks at what would be lost
        yield
        return
    entries: Any = joint_graph.patterns.patterns
    key = "call_function", torch.ops.prims.convert_element_type.default
    before = entries[key]
    drops: Any = joint_graph.pointless_convert
    entries[key] = [entry for entry in before if getattr(entry, "handler", None) is not drops]
    try:
        yield
    finally:
        entries[key] = before
