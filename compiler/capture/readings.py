"""What a trace read of its surroundings, as short expressions that a later start evaluates without Dynamo.

    value(module('math_of_mine').SCALE)    type(forward.args[0])    keys(forward.keywords)
    length(x)    contains(x, key)    has(x, 'name')    same(x, y)

`forward` is the program's callable; attributes, items and the few functions below lead on from it.
"""

import ast
import functools
import importlib
import operator
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...common.errors import CompileError
from .describe import CannotDescribe, Describer

Readings = Mapping[str, str]  # expression -> what it gave
UNANSWERED = "no answer: "


def _module(name: str) -> types.ModuleType:
    return sys.modules[name] if name in sys.modules else importlib.import_module(name)


def _dict_of(value: Any) -> dict[Any, Any]:
    return dict(value)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "module": _module,
    "type": type,
    "dict": _dict_of,
    "list": list,
    "tuple": tuple,
    "getattr": getattr,
    "super": super,
    "dict.keys": dict.keys,
    "dict.values": dict.values,
    "dict.__getitem__": dict.__getitem__,
    "list.__getitem__": list.__getitem__,
    "tuple.__getitem__": tuple.__getitem__,
    "object.__getattribute__": object.__getattribute__,
    "set.__contains__": set.__contains__,
}


def ask(
    questions: Iterable[str], forward: object, codes: set[types.CodeType] | None = None
) -> dict[str, str]:
    """Every question with its answer now; one that cannot be answered says why.

    codes takes every code object that an answer covers.
    """
    describe = Describer(codes=codes)
    return {question: _answer(question, forward, describe) for question in sorted(questions)}


def _answer(question: str, forward: object, describe: Describer) -> str:
    try:
        tree = _parse(question)
        if not isinstance(tree, ast.Call):
            raise ValueError("no question")
        values = [_evaluate(argument, forward) for argument in tree.args]
        return ASPECTS[ast.unparse(tree.func)](describe, *values)
    except CannotDescribe as error:
        return f"{UNANSWERED}it depends on {error}"
    except Exception as error:  # whatever user code raises where an attribute is gone
        return f"{UNANSWERED}{type(error).__name__}: {error}"[:200]


def _keys_text(describe: Describer, value: Any) -> str:
    return describe(list(value.keys() if hasattr(value, "keys") else value))


def _length_text(describe: Describer, value: Any) -> str:
    """The length; of a dict or set the keys, of which Dynamo guards the length alone in `list(...)`."""
    if isinstance(value, (dict, set, frozenset)):
        return _keys_text(describe, value)
    return str(operator.length_hint(value))


def _type_text(describe: Describer, value: Any) -> str:
    """The type, the attributes' names, and the object's number: absence and identity are unguarded."""
    kind = type(value)
    slots = {name for one in kind.__mro__ for name in vars(one).get("__slots__", ()) if hasattr(value, name)}
    own = getattr(value, "__dict__", {})
    return f"{describe(kind)} with {describe(sorted({*own, *slots}))} {describe.which(value)}"


ASPECTS: dict[str, Callable[..., str]] = {
    "value": lambda describe, value: describe(value),
    "type": _type_text,
    "length": _length_text,
    "keys": _keys_text,
    "same": lambda describe, value, other: str(value is other),
    "contains": lambda describe, value, key: str(key in value),
    "has": lambda describe, value, name: str(hasattr(value, name)),
    "own": lambda describe, value, name: str(name in getattr(value, "__dict__", {})),
}


def _evaluate(node: ast.expr, forward: object) -> Any:
    """The value of an expression of the module's language; ValueError for any other syntax."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in ("forward", "builtins"):
        return forward if node.id == "forward" else _module("builtins")
    if isinstance(node, ast.Attribute):
        return getattr(_evaluate(node.value, forward), node.attr)
    if isinstance(node, ast.Subscript):
        return _evaluate(node.value, forward)[_evaluate(node.slice, forward)]
    if isinstance(node, ast.Tuple):
        return tuple(_evaluate(item, forward) for item in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, forward)
    if isinstance(node, ast.Call) and not node.keywords:
        function = FUNCTIONS.get(ast.unparse(node.func))
        if function is not None:
            return function(*[_evaluate(argument, forward) for argument in node.args])
    raise ValueError(f"{ast.unparse(node)} is no expression of a reading")


class Covered(Exception):
    """A subject of which no question need be asked."""


class _Rename(ast.NodeTransformer):
    """Dynamo's names for globals in place of the modules and scopes that they stand for."""

    def __init__(self, scope: Mapping[str, Any], forward: object) -> None:
        self.scope, self.forward = scope, forward

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id in ("G", "L"):
            assert isinstance(node.slice, ast.Constant)
            name = str(node.slice.value)
            return ast.Name(id=name, ctx=ast.Load()) if node.value.id == "L" else self._global(name)
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if ast.unparse(node.func) == "__import__":
            return _parse(f"module({ast.unparse(node.args[0])})")
        self.generic_visit(node)
        return node

    def _global(self, name: str) -> ast.expr:
        value, home = self.scope[name], self.scope["__name__"]
        if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
            return _parse(f"module({value.__name__!r})")
        if value is vars(_module("builtins")):
            return _parse("builtins.__dict__")
        if isinstance(value, dict) and str(value.get("__name__")).startswith("namedtuple_"):
            raise Covered  # what the interpreter generates for a class, of which it is a part
        if name in vars(_module(home)):
            return _parse(f"module({home!r}).{name}")
        found = _scope_of(value, self.forward, set())
        if found is None:
            raise ValueError(f"the global {name} of the trace leads nowhere")
        return _parse(found)


def _scope_of(scope: object, function: object, seen: set[int], path: str = "forward") -> str | None:
    """The expression of the globals of a function that is in no module, looked for from `function` on."""
    if id(function) in seen:
        return None
    seen.add(id(function))
    globals_of = getattr(function, "__globals__", None)
    if globals_of is scope:
        return f"{path}.__globals__"
    following: list[tuple[str, object]] = [
        (f".{name}", getattr(function, name, None)) for name in ("func", "__func__")
    ]
    cells = getattr(function, "__closure__", None) or ()
    for index, cell in enumerate(cells):
        following.append((f".__closure__[{index}].cell_contents", cell.cell_contents))
    if isinstance(globals_of, dict):
        code: Any = getattr(function, "__code__", None)
        names = code.co_names
        following += [(f".__globals__[{name!r}]", globals_of[name]) for name in names if name in globals_of]
    for step, one in following:
        if callable(one) and not isinstance(one, type):
            found = _scope_of(scope, one, seen, path + step)
            if found is not None:
                return found
    return None


def _parse(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def subject_of(name: str, scope: Mapping[str, Any], forward: object) -> str:
    """Dynamo's name for what a guard is about, in the language of readings.

    Raises ValueError where it has no word, Covered where another answer says as much.

    scope: the globals of the traced frame, in which Dynamo keeps its aliases.
    """
    tree = ast.fix_missing_locations(_Rename(scope, forward).visit(_parse(name)))
    return ast.unparse(tree)


def name_of(forward: object) -> str:
    """A name for a program, by which what earlier traces of it read is found."""
    function: Any = forward
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def require_answers(answers: Readings) -> None:
    """Raise CompileError for a reading that could not be repeated even now."""
    for question, answer in answers.items():
        if answer.startswith(UNANSWERED):
            raise CompileError(
                f"the model reads {question}, which no cache key can hold "
                f"({answer.removeprefix(UNANSWERED)}); "
                f"pass it as an argument, a weight or a field of the config"
            )
