"""What a Python value is, as text that is the same in every process: constants, code, what code refers to."""

import enum
import functools
import hashlib
import logging
import pathlib
import re
import sys
import types
import typing
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ..torch_internals.torch_compat import OPS
from .covered import is_covered, is_covered_module

PLAIN = (bool, int, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), range, slice)
BUILTIN = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.MethodWrapperType, types.ClassMethodDescriptorType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType,),
)
OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo)
NAMED = (pathlib.PurePath, logging.Logger, np.generic, np.dtype, types.UnionType, types.GenericAlias)
OF_TYPING = (typing.TypeVar, type(typing.Any), type(Mapping[str, int]))
UNREAD = {"__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "__static_attributes__"}
UNREAD |= {"__annotations__", "__annotate_func__", "__annotations_cache__", "__conditional_annotations__"}
UNREAD |= {"_abc_impl", "__abstractmethods__", "__slots__", "__match_args__", "__parameters__"}


# What is the same wherever it is equal: which copy of it is met depends on how the code was loaded.
BY_VALUE = (tuple, frozenset, types.CodeType, types.MethodType)


class CannotDescribe(Exception):
    """A value whose content no text holds; the message says where it was met."""


def describe(value: object, *, whole: bool = False, codes: set[types.CodeType] | None = None) -> str:
    """A short text or a hash that differs wherever the value, its code or what the code names differs.

    whole: instances are described by what they hold, and what cannot be is CannotDescribe; else they are
    described by their class alone. codes takes every code object that the description covers.
    """
    return Describer(whole=whole, codes=codes)(value)


class Describer:
    """Descriptions of many values: what was met before is named by its number, so none is walked twice."""

    def __init__(self, *, whole: bool = False, codes: set[types.CodeType] | None = None) -> None:
        self._whole = whole
        self._codes = set() if codes is None else codes
        self._in_class = False
        self._met: dict[int, str] = {}
        self._labels: Counter[str] = Counter()
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []  # what is alive keeps its id

    def __call__(self, value: object) -> str:
        """The description of one value."""
        text = self.text(value, "it")
        return text if len(text) <= 120 else f"{text[:40]}… {hashlib.sha256(text.encode()).hexdigest()[:32]}"

    def text(self, value: object, path: str) -> str:
        """The description of a value; path says where it is."""
        plain = _plain(value)
        if plain is not None:
            return plain
        if id(value) in self._met:
            return self._met[id(value)]
        if not isinstance(value, BY_VALUE):
            self._met[id(value)] = self._label(value)
            self._kept.append(value)
        for kinds, describe_one in self._rules():
            if isinstance(value, kinds):
                return describe_one(value, path)
        return self._instance(value, path)

    def which(self, value: object) -> str:
        """The number of an object, counted as they are met: aliases of one object have one number."""
        if _plain(value) is not None:
            return ""
        self._kept.append(value)
        return f"object {self._numbers.setdefault(id(value), len(self._numbers))}"

    def _label(self, value: object) -> str:
        """A name for what was met, to name it by when it is met again."""
        named = value if isinstance(value, (type, types.FunctionType)) else type(value)
        name = f"{named.__module__}.{named.__qualname__}"
        self._labels[name] += 1
        return f"#{name}~{self._labels[name]}"

    def _rules(self) -> tuple[tuple[Any, Callable[[Any, str], str]], ...]:
        return (
            (types.FunctionType, self._function),
            (types.MethodType, self._method),
            (types.CodeType, self._code),
            (types.CellType, self._cell),
            (functools.partial, self._partial),
            (type, self._class),
            (property, lambda value, path: self._each([value.fget, value.fset, value.fdel], path)),
            ((staticmethod, classmethod), lambda value, path: self.text(value.__func__, path)),
            (functools.cached_property, lambda value, path: self.text(value.func, path)),
            (tuple, lambda value, path: self._name(type(value), path) + self._each(value, path)),
            ((list, deque), self._each),
            (functools._lru_cache_wrapper, lambda value, path: self.text(value.__wrapped__, path)),
            ((set, frozenset), lambda value, path: "{" + ",".join(sorted(self._apart(value, path))) + "}"),
            ((dict, types.MappingProxyType), self._mapping),
        )

    def _name(self, kind: type, path: str) -> str:
        return "" if kind in (tuple, list, dict) else self.text(kind, path)

    def _each(self, values: Iterable[object], path: str) -> str:
        texts = [self.text(value, f"{path}[{index}]") for index, value in enumerate(values)]
        return f"[{','.join(texts)}]"

    def _apart(self, values: Iterable[object], path: str) -> list[str]:
        """Sorted descriptions of unordered values, each made as if it alone had been met."""
        return [Describer(whole=self._whole, codes=self._codes).text(value, path) for value in values]

    def _mapping(self, values: Mapping[Any, object], path: str) -> str:
        pairs = [f"{self.text(k, path)}:{self.text(v, f'{path}[{k!r:.40}]')}" for k, v in values.items()]
        return f"{self._name(type(values), path)}{{{','.join(pairs)}}}"

    def _function(self, value: types.FunctionType, path: str) -> str:
        name = f"{value.__module__}.{value.__qualname__}"
        if getattr(value, "_dynamo_marked_constant", False):
            raise CannotDescribe(f"{name} at {path}, whose result is taken as a constant")
        home = sys.modules.get(str(value.__globals__.get("__name__")))
        if home is not None and vars(home) is not value.__globals__:
            raise CannotDescribe(
                f"{name} at {path}, whose globals are not those of the module {home.__name__}"
            )
        parts = [value.__code__, value.__defaults__, value.__kwdefaults__, value.__closure__]
        wrapped = value.__dict__.get("__wrapped__")
        return f"function {name}({self._each([*parts, wrapped], path)}{self._globals(value, path)})"

    def _globals(self, function: types.FunctionType, path: str) -> str:
        """What a function's code finds by the names it mentions, in its module and in modules it names."""
        if self._in_class and not self._whole:
            return ""  # a class brings methods that nobody called; for those that were, Dynamo has guards
        names = sorted({name for code in nested_codes(function.__code__) for name in code.co_names})
        found = {name: function.__globals__[name] for name in names if name in function.__globals__}
        texts = [f"{name}={self._named(value, names, f'{path}.{name}')}" for name, value in found.items()]
        return ",".join(texts)

    def _named(self, value: object, names: list[str], path: str) -> str:
        """The description of a global; of a module, only of the attributes that the code names."""
        if not self._whole and isinstance(value, (dict, list, set)):
            return type(value).__name__  # for what was read of it Dynamo has guards
        if not isinstance(value, types.ModuleType):
            return self.text(value, path)
        if is_covered_module(value.__name__) or id(value) in self._met:
            return f"module {value.__name__}"
        self._met[id(value)] = ""
        read = {name: vars(value)[name] for name in names if name in vars(value)}
        texts = [f"{name}={self._named(one, names, f'{path}.{name}')}" for name, one in read.items()]
        del self._met[id(value)]  # another function names other things of it
        return f"module {value.__name__}({','.join(texts)})"

    def _method(self, value: types.MethodType, path: str) -> str:
        return f"method {self.text(value.__func__, path)} of {self.text(value.__self__, f'{path}.__self__')}"

    def _partial(self, value: functools.partial[Any], path: str) -> str:
        return f"partial {self._each([value.func, value.args, value.keywords], path)}"

    def _cell(self, value: types.CellType, path: str) -> str:
        try:
            return self.text(value.cell_contents, f"{path} (closed over)")
        except ValueError:
            return "an empty cell"

    def _code(self, value: types.CodeType, path: str) -> str:
        self._codes.update(nested_codes(value))
        return f"code {_code_hash(value)}"

    def _class(self, value: type, path: str) -> str:
        name = f"{value.__module__}.{value.__qualname__}"
        members = {key: one for key, one in sorted(vars(value).items()) if key not in UNREAD}
        outside, self._in_class = self._in_class, True
        texts = [f"{key}={self._member(one, f'{path}.{key}')}" for key, one in members.items()]
        bases = self._each(value.__bases__, path)
        self._in_class = outside
        return f"class {name}{bases}({','.join(texts)})"

    def _member(self, value: object, path: str) -> str:
        """A member of a class; what the interpreter or a library made for it is described by its type."""
        try:
            return self.text(value, path)
        except CannotDescribe:
            return f"a {type(value).__module__}.{type(value).__qualname__}"

    def _instance(self, value: object, path: str) -> str:
        kind = self.text(type(value), path)
        if not self._whole:
            return f"a {kind}"
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(np.ascontiguousarray(value))
        if isinstance(value, torch.Tensor):
            return f"a {kind}{_tensor_text(value)}"
        state = _state_of(value)
        if state is None:
            raise CannotDescribe(f"{type(value).__module__}.{type(value).__qualname__} at {path}")
        return f"a {kind}{self._mapping(dict(state), path)}"


def _plain(value: object) -> str | None:
    """A value by its type and text alone, floats by their bits; None where that says too little."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__module__}.{type(value).__qualname__}.{value.name}={value.value!r}"
    if type(value) is float:
        return f"float {value.hex()}"
    if type(value) in PLAIN:
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, torch.Size):
        return f"Size {tuple(value)}"
    if isinstance(value, (*OF_TORCH, *OPS)):
        return str(value)
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, (type, types.FunctionType)) and is_covered(value):
        return f"{'class' if isinstance(value, type) else 'function'} {value.__module__}.{value.__qualname__}"
    if isinstance(value, re.Pattern):
        return f"pattern {value.pattern!r} {value.flags}"
    if isinstance(value, (*NAMED, *OF_TYPING)):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, BUILTIN):
        return f"builtin {getattr(value, '__module__', None) or ''}.{value.__qualname__}"
    return None


@functools.lru_cache(maxsize=4096)
def _code_hash(code: types.CodeType) -> str:
    """The code as it runs: neither its file nor its lines."""
    names = [code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars]
    counts = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
    body = [code.co_code, getattr(code, "co_exceptiontable", b""), code.co_consts]
    text = Describer().text([*names, *counts, *body], "code")
    return hashlib.sha256(text.encode()).hexdigest()


def _state_of(value: object) -> dict[str, object] | None:
    """What an instance of a class written in Python holds, or None."""
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name) and name != "__dict__"}
    if not hasattr(value, "__dict__") and not slots:
        return None
    if is_covered(type(value)) and type(value).__module__ not in ("types", "collections"):
        return None  # locks, files and the like hold more than their attributes say
    return held | dict(sorted(getattr(value, "__dict__", {}).items()))


def _tensor_text(value: torch.Tensor) -> str:
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"({list(value.shape)} {value.dtype} {hashlib.sha256(data).hexdigest()})"


def nested_codes(code: types.CodeType) -> list[types.CodeType]:
    """A code object and those of the functions that are made inside it."""
    inner = [
        one for const in code.co_consts if isinstance(const, types.CodeType) for one in nested_codes(const)
    ]
    return [code, *inner]
