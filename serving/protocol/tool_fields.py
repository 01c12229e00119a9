"""Tools in requests: the functions that a model may call, and whether it has to."""

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ...common.errors import shown
from ..errors import ApiError
from .decoding import wrong

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
MAX_TOOLS = 1024
MAX_DEPTH = 64  # of a schema
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")  # of schemas
MAPPINGS = ("properties", "$defs", "definitions", "patternProperties")  # of schemas by name


class Function(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object, the arguments; without one there are none."""
    strict: bool | None = None
    """Required calls keep to the schema in any case; those of auto are as the model writes them."""


class Tool(msgspec.Struct, kw_only=True, frozen=True):
    """A tool; functions alone are served."""

    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, kw_only=True, frozen=True):
    """The name of one of the tools."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True, frozen=True):
    """The tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def check_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> None:
    """Raises ApiError, naming the field, for tools that cannot be offered, or chosen."""
    if tools is None:
        if choice not in (None, "none"):
            what = "a tool" if isinstance(choice, NamedTool) else choice
            raise wrong(
                "tool_choice", f"tool_choice is {what}, but tools is missing; wanted both, or neither"
            )
        return
    if not 0 < len(tools) <= MAX_TOOLS:
        raise wrong("tools", f"tools holds {len(tools)} tools; wanted one or more, at most {MAX_TOOLS}")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        _check_function(f"tools[{index}].function", tool.function, names)
        names.add(tool.function.name)
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        got = f"tool_choice.function.name is {shown(choice.function.name)}"
        raise wrong("tool_choice.function.name", f"{got}; wanted the name of one of tools")


def _check_function(where: str, function: Function, others: set[str]) -> None:
    if not NAME.fullmatch(function.name):
        wanted = "wanted letters, digits, and any of _ . -, at most 64 characters"
        raise wrong(f"{where}.name", f"{where}.name is {shown(function.name)}; {wanted}")
    if function.name in others:
        raise wrong(
            f"{where}.name", f"{where}.name is {shown(function.name)} as that of another; wanted its own"
        )
    if function.parameters is not None:
        path = f"{where}.parameters"
        _check_schema(path, path, function.parameters, 0)
        type_ = function.parameters.get("type", "object")
        if type_ != "object" and not (isinstance(type_, list) and "object" in type_):
            raise wrong(path, f"{path}.type is {shown(type_)}; wanted object, as arguments are one")


def _check_schema(param: str, path: str, schema: Any, depth: int) -> None:
    """Raises ApiError for what no JSON schema can be, at its param, saying where in it."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _no_schema(param, path, schema, "a JSON schema")
    if depth > MAX_DEPTH:
        raise wrong(param, f"{param} is nested more than {MAX_DEPTH} deep; wanted a flatter schema")
    types = schema.get("type")
    listed = types if isinstance(types, list) else [types]
    if types is not None and not all(isinstance(each, str) and each in TYPES for each in listed):
        raise _no_schema(param, f"{path}.type", types, f"one of {', '.join(TYPES)}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        raise _no_schema(param, f"{path}.required", required, "a list of names")
    if not isinstance(schema.get("enum", []), list):
        raise _no_schema(param, f"{path}.enum", schema["enum"], "a list of values")
    for inner, value in _inner_schemas(param, path, schema):
        _check_schema(param, inner, value, depth + 1)


def _inner_schemas(param: str, path: str, schema: dict[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key in MAPPINGS:
        held = schema.get(key, {})
        if not isinstance(held, dict):
            raise _no_schema(param, f"{path}.{key}", held, "schemas by name")
        found += [(f"{path}.{key}.{name}", value) for name, value in held.items()]
    for key in LISTS:
        held = schema.get(key, [])
        if not isinstance(held, list):
            raise _no_schema(param, f"{path}.{key}", held, "a list of schemas")
        found += [(f"{path}.{key}[{place}]", value) for place, value in enumerate(held)]
    if "items" in schema and not isinstance(schema["items"], list):  # a list in older drafts
        found.append((f"{path}.items", schema["items"]))
    if "additionalProperties" in schema:
        found.append((f"{path}.additionalProperties", schema["additionalProperties"]))
    return found


def _no_schema(param: str, path: str, got: Any, wanted: str) -> ApiError:
    return wrong(param, f"{path} is {shown(got)}; wanted {wanted}")
