"""Messages of a chat as templates can read them: text parts joined, arguments of tool calls parsed."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...common.errors import RequestError, shown

LOOPS_OVER_PARTS = re.compile(r"for\s+\w+\s+in\s+[\w.\[\]'\"-]*\bcontent\b")
CONTINUED = "<|the answer goes on here|>"  # marks the end of a text in what a template makes of it
SET_BY_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
# An enum or a number of some library becomes the text or number that it is.
_STRIP: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}

Messages = Sequence[Mapping[str, Any]]


def plain(value: Any) -> Any:
    """Returns data without behaviour: a template is a stranger's program and must find no methods to call.

    TypeError for what is no text, number, list or dict.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return _STRIP[kind](value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if callable(dump := getattr(value, "model_dump", None)):  # messages as the clients of APIs hand them out
        return plain(dump())
    raise TypeError(f"{shown(value)} is a {type(value).__name__}; wanted text, numbers, lists and dicts")


def check_messages(messages: Messages) -> None:
    """Raises RequestError where messages are no list of roles with contents."""
    wanted = "wanted a list of at least one {'role': ..., 'content': ...}"
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages is {shown(messages)}; {wanted}")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise RequestError(f"a message is {shown(message)}; {wanted}")


def check_template_kwargs(given: Any) -> dict[str, Any]:
    """Returns variables for the template as plain data; RequestError names what is none."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise RequestError(f"template_kwargs is {shown(given)}; wanted a dict of the template's variables")
    taken = [name for name in SET_BY_ARGUMENTS if name in given]
    if taken:
        raise RequestError(
            f"template_kwargs has {shown(taken[0])}; wanted as an argument of its own: {taken[0]}="
        )
    try:
        return {name: plain(value) for name, value in given.items()}
    except Exception as error:  # a class of the caller's: anything may come out of it
        raise RequestError(f"template_kwargs holds no plain data: {shown(error)}") from error


def readable(messages: Messages, template: str) -> Iterator[list[dict[str, Any]]]:
    """Yields the messages in one form after another: the first that the template takes serves.

    Arguments of tool calls are parsed, as templates want them, or else stay text; a message of tool calls
    alone has no content, or else an empty one. RequestError names the message and the field that is wrong.
    """
    joins = not LOOPS_OVER_PARTS.search(template)
    parsed = [_message(index, message, joins) for index, message in enumerate(messages)]
    if "developer" not in template:  # the newer name of the same role
        parsed = [_renamed(message) for message in parsed]
    unparsed = [_with_arguments_of(message, before) for message, before in zip(parsed, messages, strict=True)]
    seen: list[list[dict[str, Any]]] = []
    for form in (parsed, [*map(_with_content, parsed)], unparsed, [*map(_with_content, unparsed)]):
        if form not in seen:
            seen.append(form)
            yield form


def marked(messages: Messages) -> list[Mapping[str, Any]]:
    """Returns the messages, the end of the last one's text marked; RequestError where it has no text."""
    content = messages[-1].get("content")
    if not isinstance(content, str):
        raise RequestError(
            f"continue_final_message is True, but the last message's content is {shown(content)}; "
            "wanted a text to go on from"
        )
    # The blank behind it shows whether the template strips texts.
    return [*messages[:-1], {**messages[-1], "content": f"{content}{CONTINUED} "}]


def until_mark(text: str) -> str:
    """Returns what a template made of marked messages, up to the mark."""
    before, mark, after = text.rpartition(CONTINUED)
    if not mark:
        raise RequestError(
            "continue_final_message is True, but the chat template does not show the last message's content"
        )
    return before if after.startswith(" ") else before.rstrip()


def _message(index: int, message: Mapping[str, Any], joins: bool) -> dict[str, Any]:
    try:
        found: dict[str, Any] = plain(message)
    except Exception as error:  # a class of the caller's: anything may come out of it
        raise RequestError(f"messages[{index}] holds no plain data: {shown(error, 200)}") from error
    content = found.get("content")
    if isinstance(content, list):
        texts = [_text_of(index, place, part) for place, part in enumerate(content)]
        found["content"] = "".join(texts) if joins else content
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            f"messages[{index}]['content'] is {shown(content)}; wanted a text or a list of "
            "{'type': 'text', 'text': ...}"
        )
    calls = found.pop("tool_calls", None)
    if calls:
        found["tool_calls"] = _calls(f"messages[{index}]['tool_calls']", calls)
    elif calls not in (None, [], ()):
        raise RequestError(f"messages[{index}]['tool_calls'] is {shown(calls)}; wanted a list of calls")
    return found


def _renamed(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _text_of(index: int, place: int, part: Any) -> str:
    where = f"messages[{index}]['content'][{place}]"
    if not isinstance(part, Mapping) or "type" not in part:
        raise RequestError(f"{where} is {shown(part)}; wanted {{'type': 'text', 'text': ...}}")
    if part["type"] != "text":
        raise RequestError(
            f"{where} is of type {shown(part['type'])}; wanted 'text': Lamina reads text alone"
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}['text'] is {shown(part.get('text'))}; wanted a text")
    return str(part["text"])


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, (list, tuple)):
        raise RequestError(f"{where} is {shown(calls)}; wanted a list of calls")
    return [_call(f"{where}[{place}]", call) for place, call in enumerate(calls)]


def _call(where: str, call: Any) -> dict[str, Any]:
    """Returns a call with its arguments as an object; the function may stand in it or be it."""
    if not isinstance(call, Mapping):
        raise RequestError(
            f"{where} is {shown(call)}; wanted {{'function': {{'name': ..., 'arguments': ...}}}}"
        )
    if "function" in call:
        return {**call, "function": _call(f"{where}['function']", {**_function(where, call)})}
    if not isinstance(call.get("name"), str):
        raise RequestError(f"{where}['name'] is {shown(call.get('name'))}; wanted the name of a function")
    arguments = call.get("arguments")
    if arguments is None:
        return dict(call)
    return {**call, "arguments": _arguments(f"{where}['arguments']", arguments)}


def _function(where: str, call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    if not isinstance(function, Mapping) or "function" in function:
        raise RequestError(
            f"{where}['function'] is {shown(function)}; wanted {{'name': ..., 'arguments': ...}}"
        )
    return function


def _arguments(where: str, arguments: Any) -> Any:
    found = arguments
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} is {shown(arguments)}, no JSON: {shown(error, 200)}") from error
    if not isinstance(found, Mapping):
        raise RequestError(f"{where} is {shown(arguments)}; wanted a JSON object")
    return found


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    is_bare = message.get("content") is None and "tool_calls" in message
    return {**message, "content": ""} if is_bare else message


def _with_arguments_of(message: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message with its tool calls as they were given."""
    return {**message, "tool_calls": plain(before["tool_calls"])} if "tool_calls" in message else message
