"""What a chat asks of its answers beside text: how they are read, and which form they are held to."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...common.errors import RequestError
from ...common.structural_tokens import NO_TOKENS, StructuralTokens
from ...runtime.structured_output.json_schema import enforceable
from ...runtime.structured_outputs import StructuredOutputs
from ..protocol.chat import ChatRequest
from ..protocol.decoding import placed, wrong
from ..protocol.generation import check_form
from ..protocol.tool_fields import Tool
from .formats import PLAIN, ToolFormat, reasoning_tags, tool_format
from .grammar import OfferedTool, UnwritableError, calls_grammar
from .reader import AnswerReader
from .reasoning import ReasoningParser, ReasoningTags

if TYPE_CHECKING:
    from ...runtime.engine.input_processor import InputProcessor
    from ...runtime.sampling_params import SamplingParams
    from ..config import ServeConfig

PROMPT_END = 16  # tokens of a prompt that tell whether it began the reasoning


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPlan:
    """How the answers to one chat are read and constrained; made of its request and its prompt."""

    given: ChatRequest
    processor: "InputProcessor"
    form: ToolFormat | None  # None: no tools are offered
    tags: ReasoningTags | None
    reasoning: str = "none"  # open: the prompt began it; possible; none: there is none to come

    @property
    def reads(self) -> bool:
        """Whether there is more in an answer than text."""
        return self.form is not None or self.tags is not None

    def new_reader(self) -> AnswerReader:
        """Returns what reads one answer."""
        tags, names = self.tags, [tool.function.name for tool in self.given.offered_tools]
        return AnswerReader(
            reasoning=None if tags is None else ReasoningParser(tags, is_open=self.reasoning == "open"),
            tools=None if self.form is None else self.form.parser(names),
            shows_reasoning=self.given.include_reasoning,
            id_length=self.form.id_length if self.form else 0,
        )

    def params(self, params: "SamplingParams") -> "SamplingParams":
        """Returns the parameters with the form that answers are held to; ApiError for one that cannot be."""
        if not self.reads:
            return params
        form = self._structured(params.structured_outputs)
        if form is not None and self.tags is not None and self.reasoning != "none":
            begin = self.tags.begin if self.reasoning == "possible" else None
            form = dataclasses.replace(form, reasoning_end=self.tags.end, reasoning_begin=begin)
        markers = {*(self.form.markers if self.form else ()), *self._tag_texts}
        tokenizer = self.processor.tokenizer
        is_text = tokenizer is None or markers.isdisjoint(tokenizer.special_tokens.values())
        skips = params.skip_special_tokens and is_text
        return dataclasses.replace(params, structured_outputs=form, skip_special_tokens=skips)

    def check(self, params: "SamplingParams") -> list[str]:
        """Returns what the form of the answers leaves out, having compiled it in a thread's time.

        ApiError for what cannot be enforced, naming the schema of the first tool that cannot be.
        """
        tools = self.given.required_tools
        if tools is None and self.given.form is not None:
            return check_form(self.given, params, self.processor)
        try:
            return self.processor.warnings_of(params)
        except RequestError as error:
            for tool in tools or ():
                self._check_one(tool)
            raise placed(error, "ignore_eos" if str(error).startswith("ignore_eos") else "tools") from None

    def _check_one(self, tool: Tool) -> None:
        from ...runtime.sampling_params import SamplingParams

        form = self._calls_of([tool])
        try:
            self.processor.grammar_of(SamplingParams(structured_outputs=form))
        except RequestError as error:
            raise placed(error, self._schema_of(tool)) from None

    def _structured(self, asked: StructuredOutputs | None) -> StructuredOutputs | None:
        """Returns the form of the answers: required calls, else what is asked for, or either."""
        tools = self.given.required_tools
        if tools is not None:
            return self._calls_of(tools)
        if self.form is None or asked is None:
            return asked
        field = self.given.form[0] if self.given.form else "structured_outputs"
        if asked.json is None and not asked.json_object:
            raise wrong(
                field,
                f"{field} asks for a text, which no call has; wanted JSON, or tool_choice none beside it",
            )
        schema = json.loads(asked.json) if isinstance(asked.json, str) else {"type": "object"}
        try:
            otherwise = _guided(schema, asked)
        except RequestError as error:
            raise placed(error, field) from None
        return self._calls_of(self.given.offered_tools, otherwise=otherwise)

    def _calls_of(
        self, tools: Sequence[Tool], *, otherwise: Mapping[str, Any] | None = None
    ) -> StructuredOutputs:
        """Returns the form of calls of these tools; ApiError names the tool whose schema it cannot hold."""
        assert self.form is not None
        named = self.given.required_tools is not None and self.given.tool_choice != "required"
        grammars = [self._grammar(tool) for tool in tools]
        grammar = calls_grammar(
            grammars,
            self.form.written,
            self._structural_tokens,
            is_single=named or not self.given.parallel_tool_calls,
            otherwise=otherwise,
        )
        try:
            return StructuredOutputs(grammar=grammar)
        except RequestError as error:  # it is too long
            raise placed(error, "tools") from None

    def _grammar(self, tool: Tool) -> OfferedTool:
        assert self.form is not None
        offered = OfferedTool(name=tool.function.name, parameters=tool.function.parameters)
        try:
            calls_grammar([offered], self.form.written, NO_TOKENS, is_single=True)
        except UnwritableError as error:
            path = self._schema_of(tool)
            raise wrong(path, f"{path} cannot be enforced in the model's form of calls: {error}") from None
        return offered

    def _schema_of(self, tool: Tool) -> str:
        return f"tools[{(self.given.tools or []).index(tool)}].function.parameters"

    @property
    def _structural_tokens(self) -> StructuralTokens:
        grammars = self.processor.grammars
        return NO_TOKENS if grammars is None else grammars.structural_tokens

    @property
    def _tag_texts(self) -> tuple[str, ...]:
        return () if self.tags is None else (self.tags.begin, self.tags.end)


def chat_plan(
    given: ChatRequest, processor: "InputProcessor", config: "ServeConfig", prompt: Sequence[int]
) -> ChatPlan:
    """Returns how the answers to a chat are read; ApiError where the model's calls cannot be."""
    template = _template_of(processor)
    tags = reasoning_tags(config.reasoning_parser, template)
    return ChatPlan(
        given=given,
        processor=processor,
        form=_form_of_calls(given, tool_format(config.tool_parser, template)),
        tags=tags,
        reasoning="none" if tags is None else _reasoning_in(given, processor, tags, prompt),
    )


def _form_of_calls(given: ChatRequest, form: ToolFormat | None) -> ToolFormat | None:
    if not given.offered_tools:
        return None
    if form is None and given.required_tools is None:
        why = "it is not known how this model writes calls; start the server with --tool-parser"
        message = f"tools are given with tool_choice auto, which is not served: {why}, or set tool_choice"
        raise wrong("tools", message, code="unsupported_field")
    return form or PLAIN


def _template_of(processor: "InputProcessor") -> str:
    """Returns the chat templates of the model, all of them."""
    return "" if processor.tokenizer is None else processor.tokenizer.chat_templates


def _reasoning_in(
    given: ChatRequest, processor: "InputProcessor", tags: ReasoningTags, prompt: Sequence[int]
) -> str:
    assert processor.tokenizer is not None
    end = processor.tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False)
    if tags.is_open(end):
        return "open"
    if given.continue_final_message:
        text = given.messages[-1].content
        is_open = isinstance(text, str) and text.rfind(tags.begin) > text.rfind(tags.end)
        return "open" if is_open else "none"
    return "none" if tags.is_over(end) else "possible"


def _guided(schema: Mapping[str, Any], asked: StructuredOutputs) -> dict[str, Any]:
    guidance = {
        "coerce_one_of": asked.lenient,
        "lenient": asked.lenient,
        "whitespace_flexible": not asked.compact,
    }
    return {**enforceable(schema), "x-guidance": guidance}
