"""In which form models write calls, how it is read, and how it is held to; others may be registered."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.metadata import entry_points

from ...common.errors import ConfigError, shown
from .json_calls import JsonCalls
from .parts import TextParser
from .python_calls import PythonCalls
from .reasoning import ReasoningTags

GROUP = "lamina.tool_parsers"  # entry points that are a ToolFormat each


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """How calls are written, as far as a grammar has to say it; None of it stands in the arguments."""

    around: tuple[str, str]  # a call, {name} in its first part standing for the tool's name
    begin: str = ""  # before all calls
    between: str | None = None  # two calls; None: there is one call alone
    end: str = ""
    is_python: bool = False  # arguments are key=value, else a JSON object
    maybe_around: tuple[str, str] = ("", "")  # all calls, as the model decides, where these are tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """One form of calls, under a name."""

    name: str
    signs: tuple[str, ...]  # texts of which a chat template that asks for it has one
    parser: Callable[[Collection[str]], TextParser]  # by the names of the tools
    written: Written
    markers: tuple[str, ...] = ()  # texts that may be special tokens, which are then to be shown
    id_length: int = 32  # of ids that templates take
    unless: tuple[str, ...] = ()  # texts with which a template asks for another form all the same

    def is_asked_for(self, template: str) -> bool:
        """Whether a chat template has a sign of this form, and none against it."""
        return any(map(template.__contains__, self.signs)) and not any(
            map(template.__contains__, self.unless)
        )


def _json_call(arguments: str = "arguments") -> tuple[str, str]:
    return f'{{"name": {{name}}, "{arguments}": ', "}"


def _hermes_call() -> tuple[str, str]:
    before, after = _json_call()
    return f"<tool_call>\n{before}", f"{after}\n</tool_call>"


PLAIN = ToolFormat(  # for models of which no form is known
    name="json",
    signs=(),
    parser=lambda names: JsonCalls((), bare=names, separators=";,"),
    written=Written(around=_json_call(), begin="[", between=", ", end="]"),
)
FORMATS = (
    ToolFormat(
        name="mistral_args",
        signs=("[ARGS]",),
        parser=lambda names: JsonCalls(["[TOOL_CALLS]"], is_named=True),
        written=Written(around=("[TOOL_CALLS]{name}[ARGS]", ""), between=""),
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        id_length=9,
    ),
    ToolFormat(
        name="mistral",
        signs=("[TOOL_CALLS]",),
        parser=lambda names: JsonCalls(["[TOOL_CALLS]"], is_named=True),
        written=Written(around=_json_call(), begin="[TOOL_CALLS][", between=", ", end="]"),
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        id_length=9,
    ),
    ToolFormat(
        name="phi4_mini",
        signs=("<|/tool_call|>", "functools["),
        parser=lambda names: JsonCalls(["<|tool_call|>", "functools"], ["<|/tool_call|>"]),
        written=Written(around=_json_call(), begin="<|tool_call|>[", between=", ", end="]<|/tool_call|>"),
        markers=("<|tool_call|>", "<|/tool_call|>"),
    ),
    ToolFormat(
        name="granite",
        signs=("<|tool_call|>",),
        parser=lambda names: JsonCalls(["<|tool_call|>", "<tool_call>"], ["</tool_call>"]),
        written=Written(around=_json_call(), begin="<|tool_call|>[", between=", ", end="]"),
        markers=("<|tool_call|>", "<tool_call>", "</tool_call>"),
    ),
    ToolFormat(
        name="hermes",
        signs=("<tool_call>",),
        parser=lambda names: JsonCalls(["<tool_call>"], ["</tool_call>"]),
        written=Written(around=_hermes_call(), between="\n"),
        markers=("<tool_call>", "</tool_call>"),
        unless=("<function=", "<arg_key>"),
    ),
    ToolFormat(
        name="gemma",
        signs=("```tool_code",),
        parser=lambda names: PythonCalls(["```tool_code"], ["```"]),
        written=Written(
            around=("{name}(", ")"), begin="```tool_code\n[", between=", ", end="]\n```", is_python=True
        ),
    ),
    ToolFormat(
        name="pythonic",
        signs=("<|python_start|>", "[func_name1(params_name1=params_value1"),
        parser=lambda names: PythonCalls(["<|python_start|>", "<|python_tag|>"], ["<|python_end|>"]),
        written=Written(
            around=("{name}(", ")"),
            begin="[",
            between=", ",
            end="]",
            is_python=True,
            maybe_around=("<|python_start|>", "<|python_end|>"),
        ),
        markers=("<|python_start|>", "<|python_end|>", "<|python_tag|>"),
    ),
    PLAIN,
    ToolFormat(
        name="llama3_json",
        signs=('{"name": function name, "parameters": dictionary of argument name and its value}',),
        parser=lambda names: JsonCalls(["<|python_tag|>"], bare=names, separators=";,"),
        written=Written(around=_json_call("parameters"), maybe_around=("<|python_tag|>", "")),
        markers=("<|python_tag|>",),
    ),
)
REASONING = {
    "think": ReasoningTags(begin="<think>", end="</think>"),
    "mistral": ReasoningTags(begin="[THINK]", end="[/THINK]"),
}
REASONING_NAMES = {**REASONING, **dict.fromkeys(("qwen3", "smollm3", "deepseek_r1"), REASONING["think"])}
_registered: dict[str, ToolFormat] = {each.name: each for each in FORMATS}


def register_tool_format(form: ToolFormat) -> None:
    """Adds a form of calls, before those that are there, or in place of the one of its name."""
    others = {name: each for name, each in _registered.items() if name != form.name}
    _registered.clear()
    _registered.update({form.name: form, **others})


def tool_format(choice: str, template: str | None) -> ToolFormat | None:
    """Returns the form of that name; for auto the one of which the template has a sign; None for none.

    Raises ConfigError for a name that is not known.
    """
    if choice == "none":
        return None
    if choice == "auto":
        return next((each for each in _registered.values() if each.is_asked_for(template or "")), None)
    if choice not in _registered:
        for entry in entry_points(group=GROUP, name=choice):
            _registered[choice] = entry.load()
            return _registered[choice]
        known = ", ".join(["auto", "none", *_registered])
        raise ConfigError(f"tool_parser is {shown(choice)}; wanted one of {known}")
    return _registered[choice]


def reasoning_tags(choice: str, template: str | None) -> ReasoningTags | None:
    """Returns the tags of that name; for auto those that the template has; None for none.

    Raises ConfigError for a name that is not known.
    """
    if choice == "none":
        return None
    if choice == "auto":
        return next((tags for tags in REASONING.values() if tags.end in (template or "")), None)
    if choice not in REASONING_NAMES:
        known = ", ".join(["auto", "none", *REASONING_NAMES])
        raise ConfigError(f"reasoning_parser is {shown(choice)}; wanted one of {known}")
    return REASONING_NAMES[choice]
