"""A program with everything around it that it could read, each part changeable alone."""

import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")
WEIGHTS = {"embedding": torch.arange(1.0, 81.0).reshape(10, 8) / 64}
TOKENS = torch.tensor([1, 5, 3], dtype=torch.int32), torch.arange(3, dtype=torch.int32)
MAIN, SIBLING = "world_of_a_test", "sibling_of_a_test"
VARIABLE, PROCESS_VARIABLE = "WORLD_OF_A_TEST", "TORCHINDUCTOR_WORLD_OF_A_TEST"
MISSING_VARIABLE = "MISSING_OF_A_TEST"

SIBLING_SOURCE = """
K = {constant}
K2 = {computed}
unread = {unread}
def helper(y):
    return y + {helper}
class Parent:
    factor = {class_attribute}
class Thing(Parent):
    def __init__(self, held):
        self.held = held
    @property
    def twice(self):
        return self.held * {property}
    def method(self, y):
        return y * {method} * self.held * self.factor
{late}
"""
# By the name of a factor, a line of the program that reads it.
LINES = {
    "global": "y = y * SCALE",
    "item": "y = y * TABLE['a']",
    "computed key": "y = y * TABLE['ab'[0]]",
    "constant": "y = y * sibling.K",
    "computed": "y = y * getattr(sibling, 'K' + '2')",
    "helper": "y = sibling.helper(y)",
    "method": "y = THING.method(y)",
    "held": "y = y * THING.held",
    "class_attribute": "y = y * sibling.Thing.factor",
    "closure": "y = y * closed",
    "partial": "y = y * keyword",
    "default": "y = y * default",
    "field": "y = y * config.scale",
    "nested": "y = y * config.rope.theta",
    "variable": "y = y * float(os.environ.get('WORLD_OF_A_TEST', '1'))",
    "getenv": "y = y * float(os.getenv('WORLD_OF_A_TEST') or 1)",
    "keys": "y = y * len(list(TABLE)[1])",
    "contains": "y = y * (2.0 if 'c' in TABLE else 3.0)",
    "length": "y = y * len(LIST)",
    "keys of a dict": "for name in TABLE: y = y * len(name)",
    "values of a dict": "y = y * sum(TABLE.values())",
    "items of a dict": "for name, one in TABLE.items(): y = y * (len(name) + one)",
    "copy of a dict": "y = y * len(sorted({**TABLE})[-1])",
    "element": "y = y * NUMBERS[0]",
    "loop": "for one in NUMBERS: y = y * one",
    "sum": "y = y * sum(NUMBERS)",
    "set": "y = y * len(sorted(NAMES)[0])",
    "frozenset": "y = y * len(list(FROZEN)[0])",
    "text": "y = y * len(TEXT)",
    "kind": "y = y * (2.0 if isinstance(KIND, float) else 3.0)",
    "enum": "y = y * (2.0 if COLOUR is Colour.RED else 3.0)",
    "enum's value": "y = y * COLOUR.value",
    "pair": "y = y * PAIR.left",
    "lambda": "y = DOUBLE(y)",
    "decorated": "y = decorated(y)",
    "bound method": "y = METHOD(y)",
    "property": "y = y * THING.twice",
    "slot": "y = y * SLOTTED.held",
    "attempt": "y = y * attempt()",
    "fallback": "y = y * getattr(THING, 'extra', 4.0)",
    "identity": "y = y * (2.0 if PICKED is NUMBERS else 3.0)",
    "none": "y = y * (2.0 if MAYBE is None else 3.0)",
    "nested function": "y = outer()(y)",
    "dtype": "y = y.to(DTYPE).float()",
    "imported inside": "import sibling_of_a_test as again; y = y * again.K",
    "from import": "y = y * K",
    "class of a call": "y = sibling.Thing(2.0).method(y)",
    "formatted": "y = y * float(f'{SCALE}')",
    "sliced": "y = y * sum(NUMBERS[:1])",
    "global in a list": "y = y * [one for one in NUMBERS][0]",
    "mapping proxy": "y = y * vars(sibling)['K']",
    "missing key": "y = y * missing_key()",
    "missing constant": "y = y * missing_constant()",
    "missing of a class": "y = y * missing_of_a_class()",
    "missing element": "y = y * missing_element()",
    "missing variable": "y = y * missing_variable()",
    "kwargs": "y = y * with_keywords(**TABLE2)",
    "has": "y = y * (2.0 if hasattr(THING, 'extra') else 3.0)",
    "default dtype": "y = y * (2.0 if torch.get_default_dtype() == torch.float32 else 3.0)",
}
MAIN_SOURCE = """
import collections
import enum
import functools
import os
import torch
import torch.nn.functional as F
import sibling_of_a_test as sibling
SCALE = {global}
TABLE = {table}
LIST = {list}
THING = sibling.Thing({held})
{extra}
NUMBERS = [{element}, 2.0]
NAMES = {{"n" * int({set})}}
FROZEN = frozenset({{"n" * int({frozenset})}})
TEXT = "t" * int({text})
KIND = 1.0 if {kind} == 1 else 1
class Colour(enum.Enum):
    RED = {enum_value}
    BLUE = 7.0
COLOUR = Colour.RED if {enum} == 1 else Colour.BLUE
Pair = collections.namedtuple("Pair", "left right")
PAIR = Pair({pair}, 2.0)
DOUBLE = lambda y: y * {lambda}
def decorate(function):
    @functools.wraps(function)
    def call(y):
        return function(y) * {decorated}
    return call
@decorate
def decorated(y):
    return y + 1
METHOD = sibling.Thing({bound}).method
class Slotted:
    __slots__ = ("held",)
SLOTTED = Slotted()
SLOTTED.held = {slot}
def attempt():
    try:
        return THING.extra
    except AttributeError:
        return 5.0
def missing_key():
    try:
        return TABLE["c"] + 2
    except KeyError:
        return 3.0
def missing_constant():
    try:
        return sibling.LATE
    except AttributeError:
        return 3.0
def missing_of_a_class():
    try:
        return sibling.Thing.late
    except AttributeError:
        return 3.0
def missing_element():
    try:
        return LIST[1] + 2
    except IndexError:
        return 3.0
def missing_variable():
    try:
        return float(os.environ["MISSING_OF_A_TEST"])
    except KeyError:
        return 3.0
PICKED = NUMBERS if {identity} == 1 else [1.0]
MAYBE = None if {none} == 1 else 3
def outer():
    def inner(y):
        return y * {nested_function}
    return inner
DTYPE = (torch.float32, torch.float64, torch.bfloat16)[int({dtype}) - 1]
from sibling_of_a_test import K
def with_keywords(**keywords):
    return sum(keywords.values())
TABLE2 = {{"a": {kwargs}}}
unread = {unread}
def make(closed):
    def forward(config, weights, token_ids, positions, attend, keyword=1.0, default={default}):
        y = F.embedding(token_ids, weights["embedding"]) * 1.0
        {lines}
        return y
    return forward
"""
# Which parts of the world count for a line, where it is not the part of its own name alone: a class whole, of
# an enum the members that are read, of an object the names of its attributes, of a dict its keys.
CLASS = ("method", "class_attribute", "property", "missing of a class")
OBJECT = (*CLASS, "has")
DICT = ("keys", "contains")
PARTS: dict[str, tuple[str, ...]] = {
    "computed key": ("item",),
    "getenv": ("variable",),
    "default dtype": (),
    "method": (*OBJECT, "held"),
    "held": (*OBJECT, "held"),
    "class_attribute": CLASS,
    "keys": DICT,
    "keys of a dict": DICT,
    "values of a dict": (*DICT, "item"),
    "items of a dict": (*DICT, "item"),
    "copy of a dict": DICT,
    "loop": ("element",),
    "sum": ("element",),
    "sliced": ("element",),
    "global in a list": ("element",),
    "enum": ("enum", "enum's value"),
    "enum's value": ("enum", "enum's value"),
    "bound method": (*CLASS, "bound"),
    "property": (*OBJECT, "held"),
    "attempt": OBJECT,
    "fallback": OBJECT,
    "has": OBJECT,
    "imported inside": ("constant",),
    "from import": ("constant",),
    "class of a call": CLASS,
    "missing of a class": CLASS,
    "formatted": ("global",),
    "mapping proxy": ("constant",),
    "missing key": ("contains",),
    "missing element": ("length",),
}
OF_EVERY_LINE = ("pass", "default")  # the defaults of a function belong to it, read or not
# Parts that are there or not: 1 or 2.
TWO_WAYS = {
    *("contains", "has", "identity", "none", "kind", "enum"),
    *("missing constant", "missing of a class"),
}
FREE = (
    "unread",
    "unread_field",
    "unread_variable",
    "ambient dtype",
    "deterministic",
    "autocast",
    "device",
    "errstate",
)


def parts_of(line: str) -> tuple[str, ...]:
    """The parts of a world that count for a line."""
    return PARTS.get(line, (line,))


@dataclass(frozen=True)
class Rope:
    theta: float
    unread: float


@dataclass(frozen=True)
class Config:
    scale: float
    rope: Rope
    unread: float


@dataclass(frozen=True, kw_only=True)
class World:
    """What is read, by lines, and a value from 1 to 3 for every part, read or not."""

    lines: tuple[str, ...]
    values: dict[str, int] = field(default_factory=dict)

    def value(self, part: str) -> int:
        return self.values.get(part, 1)

    def changed(self, part: str, value: int) -> "World":
        value = min(value, 2) if part in TWO_WAYS else value
        return replace(self, values=self.values | {part: value})

    @property
    def relevant(self) -> tuple[Any, ...]:
        """Two worlds that are equal here compute the same."""
        parts = {part for line in self.lines for part in parts_of(line)}.union(OF_EVERY_LINE)
        if "enum" not in self.lines and self.value("enum") > 1:
            parts.discard("enum's value")  # of the other member, which nobody reads then
        return self.lines, tuple((part, self.value(part)) for part in sorted(parts))

    @contextmanager
    def around(self) -> Iterator[Callable[..., Tensor]]:
        """The program's forward, in the world."""
        before = {name: os.environ.get(name) for name in (VARIABLE, PROCESS_VARIABLE, MISSING_VARIABLE)}
        os.environ[VARIABLE] = str(float(self.value("variable")))
        if self.value("missing variable") > 1:
            os.environ[MISSING_VARIABLE] = str(self.value("missing variable"))
        os.environ[PROCESS_VARIABLE] = str(self.value("unread_variable"))
        try:
            with _ambient(self):
                yield self._forward()
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                os.environ.update({} if value is None else {name: value})

    def _forward(self) -> Callable[..., Tensor]:
        values = {part: float(self.value(part)) for part in (*LINES, "unread")}
        values |= {part: float(self.value(part)) for part in ("bound", "enum's value")}
        values |= {part.replace(" ", "_").replace("'s", ""): value for part, value in values.items()}
        names = ("constant", "computed", "unread", "helper", "class_attribute", "method", "property")
        late = ["LATE = 1.0"] if self.value("missing constant") > 1 else []
        late += ["Thing.late = 1.0"] if self.value("missing of a class") > 1 else []
        parts = {name: values[name] for name in names}
        _module(SIBLING, SIBLING_SOURCE.format(**parts, late="\n".join(late)))
        table = {"a": values["item"], "k" * self.value("keys"): 0.0}
        table |= {"c": 0.0} if self.value("contains") == 2 else {}
        main = _module(
            MAIN,
            MAIN_SOURCE.format(
                **values,
                table=table,
                list=[0] * self.value("length"),
                extra="THING.extra = 1" if self.value("has") == 2 else "",
                lines="\n        ".join(LINES[line] for line in self.lines),
            ),
        )
        config = Config(
            scale=values["field"],
            rope=Rope(theta=values["nested"], unread=float(self.value("unread_field"))),
            unread=float(self.value("unread_field")),
        )
        return partial(main.make(values["closure"]), config, keyword=values["partial"])


def _module(name: str, source: str) -> Any:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile_text(source, f"{name}.py", "exec"), module.__dict__)
    return module


compile_text = __builtins__["compile"] if isinstance(__builtins__, dict) else __builtins__.compile


@contextmanager
def _ambient(world: World) -> Iterator[None]:
    import numpy as np

    dtype = torch.float64 if world.value("ambient dtype") == 2 else torch.float32
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(world.value("deterministic") == 2)
    try:
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=world.value("autocast") == 2),
            torch.device("meta" if world.value("device") == 2 else "cpu"),
            np.errstate(all="raise" if world.value("errstate") == 2 else "warn"),
        ):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
