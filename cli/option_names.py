"""Errors of the library in the words of the command line: settings by the options that give them."""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from typer.core import TyperGroup, TyperOption

from ..common.errors import LaminaError

# What the library calls the opposite of an option.
OPPOSITES = {"asymmetric": "symmetric"}
VALUE = r"'[^']*'|\"[^\"]*\"|[\w.+-]*\w"


class GroupOfCommands(TyperGroup):
    """Commands whose errors name their options."""

    def invoke(self, ctx: Any) -> Any:  # a context of the click that typer brings
        """What the command returns. LaminaErrors are the library's, in its options."""
        try:
            return super().invoke(ctx)
        except LaminaError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            error.args = (in_options(str(error), command.params if command else ()), *error.args[1:])
            raise


def in_options(text: str, parameters: Iterable[object]) -> str:
    """A text with `group_size is 7` as `--group-size is 7`, and `gptq=True` as `--gptq`.

    Names of one word, which may be words of the sentence, are taken for settings where it begins with them,
    goes on with "and NAME is", or gives them a value by =.
    """
    options = {name: one for one in parameters if isinstance(one, TyperOption) for name in _names(one)}
    if not options:
        return text
    names = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    assigned = rf"(?<!\S)({names})=({VALUE})"
    stated = rf"(?:(?<=^)|(?<=; )|(?<= and ))({names})(?: is (True|False|None)\b|(?= is | has | leaves ))"
    named = rf"(?<!\S)({'|'.join(name for name in options if '_' in name) or '(?!)'})\b(?![=(]|\.\w)"
    for pattern, write in ((assigned, _assigned), (stated, _stated), (named, _stated)):
        text = re.sub(pattern, partial(write, options), text)
    return text


def _names(option: TyperOption) -> tuple[str, ...]:
    name = option.name or ""
    return (name, OPPOSITES[name]) if name in OPPOSITES else (name,)


def _option(options: Mapping[str, TyperOption], name: str, value: str | None) -> tuple[str, str | None]:
    """The option as it is written, and what its value would be there."""
    option = options[name]
    if name != option.name and value in ("True", "False"):
        value = str(value == "False")
    off = option.secondary_opts
    if value == "False" and off:
        return off[0], "True"
    return max(option.opts, key=len), value


def _assigned(options: Mapping[str, TyperOption], match: re.Match[str]) -> str:
    name, value = _option(options, match[1], match[2])
    if value == "True":
        return name
    return f"no {name}" if value in ("False", "None") else f"{name} {(value or '').strip(chr(39) + chr(34))}"


def _stated(options: Mapping[str, TyperOption], match: re.Match[str]) -> str:
    given = match[2] if len(match.groups()) > 1 else None
    name, value = _option(options, match[1], given)
    if given is None:
        return name
    return f"{name} is given" if value == "True" else f"{name} is not given"
