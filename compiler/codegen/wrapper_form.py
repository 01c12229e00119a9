"""Which generated sources are understood: only a wrapper of a known form is run without Inductor."""

import ast
from collections.abc import Collection, Iterator

from . import torch_wrapper

Wrapper = ast.ClassDef | ast.FunctionDef

BUILTINS = frozenset({"range", "len", "zip", "tuple", "list", "int", "float", "max", "min"})
ON_DEVICE = frozenset({"torch.cuda._DeviceGuard", "torch.cuda.set_device"})
HARMLESS = (ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef, ast.ClassDef, ast.Delete)
RUNNER_INIT, RUNNER_CALL = "def __init__(self, partitions):\n    self.partitions = partitions", "self, args"
TAIL = {"runner": "Runner(partitions=[])", "call": "runner.call"}  # how a class Runner becomes `call`


def find_wrapper(tree: ast.Module) -> Wrapper | None:
    """The class Runner with its method call, or the function call, as the torch versions write it."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "call":
            return node
        if isinstance(node, ast.ClassDef) and node.name == "Runner":
            return node
    return None


def meanings(tree: ast.Module) -> dict[str, str]:
    """The full name, or the text of the value, of every name that a source binds at its top."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = ast.unparse(node.value)
    return found


def obstacle(tree: ast.Module, kernels: Collection[str], externs: Collection[str]) -> str | None:
    """Why a source needs Inductor to run, or None where its own few names and these kernels suffice.

    externs: what there is of library routines. A name counts by what the source binds it to.
    """
    wrapper = find_wrapper(tree)
    if wrapper is None:
        return "it has no function that calls its kernels"
    strange = next(filter(None, (_strange_statement(node) for node in tree.body)), None)
    bound = meanings(tree)
    if strange is None and not _has_known_form(wrapper, bound):
        strange = f"its {wrapper.name} has another form"
    if strange is not None:
        return strange
    missing = sorted(_unknown_names(wrapper, bound, kernels) | _unknown_chains(wrapper, externs))
    return f"it uses {', '.join(missing)}" if missing else None


def _strange_statement(node: ast.stmt) -> str | None:
    """Whether a statement does more than bind names or wait for kernels to be compiled."""
    text = ast.unparse(node)
    if isinstance(node, HARMLESS) or text.startswith("if __name__ =="):
        return None
    return None if text == "async_compile.wait(globals())" else f"it does {text.splitlines()[0][:60]!r}"


def _has_known_form(wrapper: Wrapper, bound: dict[str, str]) -> bool:
    """A class Runner without parts of which `call` is the method, or a plain function call(args)."""
    if wrapper.decorator_list:
        return False
    if isinstance(wrapper, ast.FunctionDef):
        return ast.unparse(wrapper.args) == "args" and "call" not in bound
    methods = {node.name: node for node in wrapper.body if isinstance(node, ast.FunctionDef)}
    call = methods.get("call")
    if call is None or "__init__" not in methods or wrapper.bases or call.decorator_list:
        return False
    is_alone = not any(isinstance(node, ast.Name) and node.id == "self" for node in ast.walk(call))
    has_parts_alone = ast.unparse(methods["__init__"]) == RUNNER_INIT
    takes_args = ast.unparse(call.args) == RUNNER_CALL
    return is_alone and has_parts_alone and takes_args and TAIL.items() <= bound.items()


def _unknown_names(wrapper: Wrapper, bound: dict[str, str], kernels: Collection[str]) -> set[str]:
    """Names that come from outside the wrapper and mean something else than they should, or nothing."""
    known = {*torch_wrapper.wrapper_values(), torch_wrapper.EXTERN_KERNELS}
    outside = _names_used(wrapper) - BUILTINS - set(kernels)
    return {name for name in outside if bound.get(name) not in known}


def _unknown_chains(wrapper: Wrapper, externs: Collection[str]) -> set[str]:
    """What is taken from torch and from the library's routines, and not known to be there."""
    chains = set(_chains(wrapper))
    of_torch = {chain for chain in chains if chain.startswith("torch.")} - ON_DEVICE
    of_library = {chain for chain in chains if chain.startswith("extern_kernels.")}
    return {chain for chain in of_torch if not torch_wrapper.is_plain_name(chain)} | {
        chain for chain in of_library if chain.removeprefix("extern_kernels.") not in externs
    }


def _chains(node: ast.AST) -> Iterator[str]:
    """The longest dotted names in a tree."""
    if isinstance(node, ast.Attribute) and (text := _dotted(node)):
        yield text
        return
    for child in ast.iter_child_nodes(node):
        yield from _chains(child)


def _dotted(node: ast.expr) -> str:
    """a.b.c as text, "" for anything that has other parts."""
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return owner and f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _names_used(wrapper: ast.AST) -> set[str]:
    """Names that must come from outside: read, and never written or bound as an argument."""
    read: set[str] = set()
    written: set[str] = set()
    for node in ast.walk(wrapper):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else written).add(node.id)
        elif isinstance(node, ast.arg):
            written.add(node.arg)
    return read - written
