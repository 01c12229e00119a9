"""Fields of the typed configs and names of schemes, read from the source: no import of torch for --help."""

import ast
from dataclasses import dataclass
from pathlib import Path

LIBRARY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """A field as its dataclass declares it: type and default as text, and the sentence below it."""

    name: str
    type: str
    default: str | None  # None for a field that must be given
    sentence: str


def read_fields(path: str, class_name: str) -> tuple[Field, ...]:
    """The fields of a dataclass in a file of the library, in order."""
    body = next(
        node.body
        for node in ast.parse((LIBRARY / path).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    return tuple(
        Field(
            name=ast.unparse(node.target),
            type=ast.unparse(node.annotation).replace("'", ""),
            default=_default(node.value),
            sentence=_sentence(after),
        )
        for node, after in zip(body, [*body[1:], ast.Pass()], strict=True)
        if isinstance(node, ast.AnnAssign)
    )


def read_schemes() -> tuple[str, ...]:
    """The names of the quantization schemes that the library has files of."""
    calls = [
        node
        for path in sorted((LIBRARY / "models" / "quantization").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "QuantScheme"
    ]
    names = [ast.literal_eval(word.value) for call in calls for word in call.keywords if word.arg == "name"]
    return tuple(name for name in names if name is not None)


def _default(value: ast.expr | None) -> str | None:
    """The text of a default; of field(default=...) that of what stands in it."""
    if isinstance(value, ast.Call):
        value = next((word.value for word in value.keywords if word.arg == "default"), value)
    return None if value is None else ast.unparse(value)


def _sentence(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""
