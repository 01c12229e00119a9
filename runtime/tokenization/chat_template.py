"""Chat templates as transformers runs them: the same environment, sandbox and data, by jinja2 alone."""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .chat_messages import plain

REASONING = ("reasoning_content", "thinking", "reasoning")  # one thing; most templates know the first


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Returns the text of a conversation; variables are what else the template may read.

    Everything reaches the template as plain JSON data. Raises jinja2.TemplateError where the template is
    wrong or refuses, TypeError for data that JSON does not have.
    """
    given = {name: plain(value) for name, value in variables.items()}
    return _compiled(template).render(messages=[_message(message) for message in messages], **given)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message without empty fields, its reasoning under every name that templates know."""
    known: dict[str, Any] = {name: value for name, value in plain(message).items() if value is not None}
    reasoning = next((known[name] for name in REASONING if name in known), None)
    return known if reasoning is None else {"thinking": reasoning, **known, "reasoning_content": reasoning}


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        "namespace": _Namespace,
    }
    return environment.from_string(template)


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what the model writes, for those who train; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """A namespace that takes no names with an underscore in front, behind which Python keeps its insides."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no name for itself, so that any may be stored
        self, *rest = args
        Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace holds no {name!r}; wanted no _ in front")
        Namespace.__setitem__(self, name, value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; the filter that jinja2 brings writes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
