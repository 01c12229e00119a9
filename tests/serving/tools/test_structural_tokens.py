"""Calls that are required, token by token: each marker is the model's own token, and no text is one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from lamina import StructuredOutputs
from lamina.runtime.engine.input_processor import grammar_compiler
from lamina.runtime.structured_output.grammar import grammar_of
from lamina.runtime.tokenization.detokenizer import IncrementalDetokenizer
from lamina.runtime.tokenization.tokenizer import Tokenizer
from lamina.runtime.worker.grammar_walk import GrammarWalk
from lamina.serving.tools.formats import FORMATS, REASONING
from lamina.serving.tools.grammar import OfferedTool, calls_grammar
from lamina.serving.tools.parts import merged
from lamina.serving.tools.reader import AnswerReader
from lamina.serving.tools.reasoning import ReasoningParser

from ...structural import STRUCTURE, allowed
from .conftest import PARAMETERS

pytest.importorskip("llguidance")
BY_NAME = {form.name: form for form in FORMATS}
MARKERS = sorted({marker for form in FORMATS for marker in form.markers})
QUOTING = {  # its values have every marker as text
    "type": "object",
    "properties": {"text": {"enum": [*MARKERS, *STRUCTURE]}},
    "required": ["text"],
    "additionalProperties": False,
}
TOOLS = [
    OfferedTool(name="get_weather", parameters=PARAMETERS),
    OfferedTool(name="now", parameters=None),
    OfferedTool(name="quote", parameters=QUOTING),
]
NAMES = [tool.name for tool in TOOLS]
CHOICES = st.lists(st.integers(0, 2**20), min_size=20, max_size=60)
END = 2


@pytest.fixture(scope="module", params=["bbpe_tokenizer", "spm_tokenizer"])
def models(request):
    """models(are_special) -> a tokenizer that has every marker as a token, and its compiler."""
    made = {}
    for are_special in (False, True):
        backend = request.getfixturevalue(request.param)()
        names = sorted({*MARKERS, *STRUCTURE} - {"<｜tool▁call｜>"})
        backend.add_tokens([AddedToken(name, special=are_special, normalized=False) for name in names])
        tokenizer = Tokenizer(backend)
        made[are_special] = tokenizer, grammar_compiler(tokenizer, tokenizer.size, [END])
    return made.__getitem__


def written(matcher, choices):
    """Tokens of an answer, as the choices have it where there is one; None for one that is not over."""
    tokens, walk = [], GrammarWalk(matcher)
    while len(tokens) < 400:
        forced = walk.token_at(len(tokens))
        ids = sorted(allowed(walk.matcher)) if forced is None else [forced]
        if END in ids:
            return tokens
        tokens.append(ids[choices[len(tokens) % len(choices)] % len(ids)])
        assert walk.move(len(tokens), lambda count: tokens[-count:])
        assert not walk.matcher.is_error(), walk.matcher.get_error()
    return None


def parts_of(form, tags, deltas):
    """What is read of an answer that comes in these pieces, neighbours of a kind as one."""
    reasoning = None if tags is None else ReasoningParser(tags, is_open=True)
    reader = AnswerReader(reasoning=reasoning, tools=form.parser(NAMES))
    return merged([*(part for delta in deltas for part in reader.feed(delta)), *reader.finish()])


def deltas_of(tokenizer, tokens, sizes):
    """The text of the tokens as steps of these sizes tell it."""
    detokenizer, at, deltas = IncrementalDetokenizer(tokenizer, skip_special_tokens=False), 0, []
    while at < len(tokens):
        size = sizes[at % len(sizes)]
        deltas.append(detokenizer.append(tokens[at : at + size]))
        at += size
    return [*deltas, detokenizer.finish()]


@pytest.mark.parametrize("name", sorted(BY_NAME))
@given(choices=CHOICES, are_special=st.booleans(), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_markers_are_one_token_each_and_calls_are_read_alike_however_they_are_cut(
    models, name, choices, are_special, sizes
):
    form, (tokenizer, compiler) = BY_NAME[name], models(are_special)
    grammar = calls_grammar(TOOLS, form.written, compiler.structural_tokens, is_single=False)
    tokens = written(compiler.matcher(grammar_of(StructuredOutputs(grammar=grammar))), choices)
    if tokens is None:
        return
    text = "".join(deltas_of(tokenizer, tokens, [1]))
    parts = parts_of(form, None, [text])
    assert parts_of(form, None, deltas_of(tokenizer, tokens, sizes)) == parts
    assert parts_of(form, None, list(text)) == parts
    check_calls(parts)
    check_markers(form, tokenizer, compiler.structural_tokens, tokens, text)


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_calls_may_stand_behind_the_token_that_some_models_begin_them_with(models, name):
    form, (tokenizer, compiler) = BY_NAME[name], models(True)
    opener, closer = form.written.maybe_around
    grammar = calls_grammar(TOOLS[1:2], form.written, compiler.structural_tokens, is_single=True)
    matcher = compiler.matcher(grammar_of(StructuredOutputs(grammar=grammar)))
    assert len(allowed(matcher)) == 2
    assert matcher.consume_token(compiler.structural_tokens.ids[opener])
    tokens = written(matcher, [0])
    assert (tokens[-1] == compiler.structural_tokens.ids.get(closer)) == bool(closer)
    (call, arguments) = parts_of(form, None, [opener, *deltas_of(tokenizer, tokens, [1])])
    assert (call.text, arguments.text) == ("now", "{}")


def check_calls(parts):
    assert {part.kind for part in parts} == {"call", "arguments"}
    for part in parts:
        if part.kind == "call":
            assert part.text in NAMES
        else:
            json.loads(part.text)


def check_markers(form, tokenizer, structural, tokens, text):
    """As many tokens of each marker as there are in what is no value of a call."""
    ids = {marker: structural.ids[marker] for marker in form.markers}
    way = form.written.maybe_around if form.written.maybe_around[0] in text[:20] else ()
    as_written = "".join((form.written.begin, *form.written.around, form.written.end, *way))
    for marker, id_ in ids.items():
        assert (tokens.count(id_) > 0) == (marker in as_written), marker
        assert text.count(marker) >= tokens.count(id_)
    pieces = tokenizer.decode([token for token in tokens if token not in ids.values()])
    for value in (value for value in QUOTING["properties"]["text"]["enum"] if value not in as_written):
        assert pieces.count(value) == text.count(value)


@pytest.mark.parametrize("tags", sorted(REASONING))
@given(
    reasoning=st.lists(st.sampled_from(["Hm", " ", "\n", "</", "think", "[/", "THINK", "<", ">", "]", "e"])),
    choices=CHOICES,
    are_special=st.booleans(),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9),
)
def test_reasoning_ends_with_its_own_token_alone(models, tags, reasoning, choices, are_special, sizes):
    form, own, (tokenizer, compiler) = BY_NAME["hermes"], REASONING[tags], models(are_special)
    end = compiler.structural_tokens.ids[own.end]
    grammar = calls_grammar(TOOLS, form.written, compiler.structural_tokens, is_single=False)
    asked = StructuredOutputs(grammar=grammar, reasoning_end=own.end)
    matcher = compiler.matcher(grammar_of(asked, compiler.structural_tokens))
    thought, said = [], ""
    for piece in reasoning:
        for token in tokenizer.encode(piece, add_special_tokens=False):
            is_end = own.end in said + tokenizer.text_of(token)
            assert (token in allowed(matcher)) != is_end
            if not is_end:
                assert matcher.consume_token(token)
                thought.append(token)
                said += tokenizer.text_of(token)
    assert not {2, compiler.structural_tokens.ids["<tool_call>"]} & allowed(matcher)
    assert matcher.consume_token(end)
    after = written(matcher, choices)
    if after is None:
        return
    tokens = [*thought, end, *after]
    parts = parts_of(form, own, deltas_of(tokenizer, tokens, sizes))
    assert parts == parts_of(form, own, ["".join(deltas_of(tokenizer, tokens, [1]))])
    assert "".join(part.text for part in parts if part.kind == "reasoning").strip() == said.strip()
    check_calls([part for part in parts if part.kind != "reasoning"])


def test_pieces_are_written_where_a_tokenizer_has_no_such_token(bbpe_tokenizer):
    tokenizer = Tokenizer(bbpe_tokenizer())
    compiler = grammar_compiler(tokenizer, tokenizer.size, [END])
    form = BY_NAME["hermes"]
    grammar = calls_grammar(TOOLS[:1], form.written, compiler.structural_tokens, is_single=True)
    asked = StructuredOutputs(grammar=grammar, reasoning_end="</think>", reasoning_begin="<think>")
    for text in ('<tool_call>\n{"name": "get_weather"', '<think>Hm</think>\n<tool_call>\n{"name": "get_w'):
        matcher = compiler.matcher(grammar_of(asked, compiler.structural_tokens))
        for token in tokenizer.encode(text, add_special_tokens=False):
            assert matcher.try_consume_tokens([token]) == 1
