"""The form of answers as requests ask for it: response_format, structured_outputs, and the older guided_*."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from ...common.errors import RequestError
from ...runtime.structured_outputs import KINDS, StructuredOutputs, kinds_in
from .decoding import Unserved, placed, wrong

NOT_ENFORCED = "it is not enforced; leave it out"
OLDER = {  # names that vLLM had before structured_outputs, and what each is there
    f"guided_{kind}": kind for kind in KINDS if kind != "json_object"
}
FIELDS = ("response_format", "structured_outputs", *OLDER)


class JsonSchemaFormat(msgspec.Struct, kw_only=True, frozen=True):
    """A JSON schema under a name; it is enforced whether strict or not."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, frozen=True):
    """Any text, any JSON object, or JSON that a schema accepts."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputsField(msgspec.Struct, kw_only=True, frozen=True):
    """One of five forms, as vLLM names them."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        "structural_tag": Unserved(why=NOT_ENFORCED),
        "whitespace_pattern": Unserved(why=NOT_ENFORCED),
        "disable_additional_properties": Unserved(why=NOT_ENFORCED, neutral=(False,)),
    }

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    lenient: bool = False
    """Whether what a schema asks for and cannot be enforced is left out, and told in a header."""
    compact: bool = False
    """Whether JSON has no blanks between its parts."""
    disable_any_whitespace: bool = False
    """The same under vLLM's name."""
    disable_fallback: bool = False
    """Taken and ignored: there is one engine, which refuses what it cannot enforce."""


def form_of(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputsField | None,
    older: Mapping[str, Any],
) -> tuple[str, StructuredOutputs] | None:
    """Returns the field that asks for a form, and the form; None for any text. ApiError for what is none.

    older: values of the fields in OLDER.
    """
    asked: dict[str, dict[str, Any]] = {
        name: {OLDER[name]: value} for name, value in older.items() if value is not None
    }
    if structured_outputs is not None:
        asked["structured_outputs"] = _fields(structured_outputs)
    if response_format is not None and response_format.type != "text":
        asked["response_format"] = _of_format(response_format)
    if not asked:
        return None
    name, *others = asked
    if others:
        raise wrong(name, f"{' and '.join(asked)} ask for a form each; wanted one of them")
    try:
        return name, StructuredOutputs(**asked[name])
    except RequestError as error:
        raise placed(error, name) from None


def _fields(given: StructuredOutputsField) -> dict[str, Any]:
    compact = given.compact or given.disable_any_whitespace
    return {**kinds_in(given), "compact": compact, "lenient": given.lenient}


def _of_format(given: ResponseFormat) -> dict[str, Any]:
    if given.type == "json_object":
        return {"json_object": True}
    if given.json_schema is None or given.json_schema.schema is None:
        path = "response_format.json_schema" + ("" if given.json_schema is None else ".schema")
        raise wrong(path, f"{path} is missing; it is required by the type json_schema")
    return {"json": given.json_schema.schema}
