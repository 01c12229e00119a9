"""Added tokens in forms: each is the one token of its structure, or text, wherever its id lies."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina import StructuredOutputs
from lamina.common.structural_tokens import StructuralTokens, is_structural
from lamina.runtime.structured_output.compiler import GrammarCompiler
from lamina.runtime.structured_output.grammar import grammar_of

from ...structural import STRUCTURE, TEXT, Added, added_tokens, allowed, size_of, with_added

pytest.importorskip("llguidance")
FREE = 'start: "" | /(.|\\n)+/'


@pytest.fixture(scope="module", params=["bbpe_tokenizer", "spm_tokenizer"])
def base(request):
    return request.getfixturevalue(request.param)()


def compiler_of(tokenizer, num_ids=None):
    num_ids = num_ids or size_of(tokenizer)
    return GrammarCompiler(tokenizer.to_str, num_valid_ids=num_ids, eos_token_ids=[2])


def written_as(tokenizer, id_):
    """What a token adds to a text, None where it is none."""
    if tokenizer.id_to_token(id_) is None:
        return None
    before = tokenizer.decode([id_of("a", tokenizer)])
    return tokenizer.decode([id_of("a", tokenizer), id_], skip_special_tokens=False)[len(before) :]


def id_of(text, tokenizer):
    return tokenizer.encode(text, add_special_tokens=False).ids[-1]


@given(added=added_tokens())
def test_text_is_every_token_but_those_of_structure_and_ids_that_nothing_has(base, added):
    tokenizer = with_added(base, added)
    ids = allowed(compiler_of(tokenizer).matcher(FREE)) - {2}
    special = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    for id_ in range(size_of(tokenizer)):
        name, written = tokenizer.id_to_token(id_), written_as(tokenizer, id_)
        if name is None or id_ in special or name in STRUCTURE:
            assert id_ not in ids, name
        elif written and "\ufffd" not in written:
            assert id_ in ids, (id_, written)


@given(added=added_tokens("a▁b", "two words"))
def test_an_added_token_that_is_text_stands_for_what_it_is_decoded_to(base, added):
    tokenizer = with_added(base, added)
    compiler = compiler_of(tokenizer)
    for name in ("a▁b", "two words"):
        id_ = tokenizer.token_to_id(name)
        form = StructuredOutputs(choice=[written_as(tokenizer, id_) + "x", "abc", "two"])
        assert compiler.matcher(grammar_of(form)).try_consume_tokens([id_]) == 1


@given(added=added_tokens("<tool_call>", "<td>"))
def test_a_token_of_structure_is_one_by_name_and_by_id_and_in_strings_text(base, added):
    tokenizer = with_added(base, added)
    compiler = compiler_of(tokenizer)
    call, cell = map(tokenizer.token_to_id, ("<tool_call>", "<td>"))
    for name in ("<tool_call>", f"<[{call}]>"):
        assert compiler.matcher(f"start: {name}").compute_ff_tokens() == [call]
    text = compiler.matcher('start: "<tool_call>"')
    tokens = text.compute_ff_tokens()
    assert tokens
    assert call not in tokens
    assert "".join(written_as(tokenizer, id_) for id_ in tokens) == "<tool_call>"
    assert cell in allowed(compiler.matcher('start: "<td>x" | "<td>y" | "<th>"'))


@given(added=added_tokens("<tool_call>"), num_left_out=st.integers(1, 3))
def test_tokens_that_the_model_has_no_logits_for_are_left_out(base, added, num_left_out):
    last = [Added(f"<last{number}>", number % 2 == 0, 0) for number in range(num_left_out)]
    tokenizer = with_added(base, [*added, *last])
    num_ids = size_of(tokenizer) - num_left_out
    compiler = compiler_of(tokenizer, num_ids)
    assert max(allowed(compiler.matcher(FREE))) < num_ids
    form = StructuredOutputs(json={"const": "<last0>"}, compact=True)
    matcher = compiler.matcher(grammar_of(form))
    while not matcher.is_stopped():
        token = min(allowed(matcher))
        assert matcher.consume_token(token)
        assert token < num_ids


@given(pieces=st.lists(st.sampled_from([*STRUCTURE, *TEXT, "a", "<", "<tool", ">", "\n"]), max_size=9))
def test_a_text_is_cut_at_its_structural_tokens_the_longest_first(pieces):
    tokens = StructuralTokens({text: at for at, text in enumerate([*STRUCTURE, "<tool_call>\n"])})
    names = {id_: text for text, id_ in tokens.ids.items()}
    text = "".join(pieces)
    found = tokens.pieces(text)
    assert "".join(piece if isinstance(piece, str) else names[piece] for piece in found) == text
    assert all(piece for piece in found if isinstance(piece, str))
    assert all(not any(name in piece for name in tokens.ids) for piece in found if isinstance(piece, str))
    assert ("<tool_call>\n" in text) == (tokens.ids["<tool_call>\n"] in found)


@pytest.mark.parametrize(
    "text", ["<tool_call>", "</think>", "<|fim_prefix|>", "[TOOL_CALLS]", "[/THINK]", "<unused7>", "<｜x｜>"]
)
def test_what_is_written_like_a_name_in_brackets_is_structure(text):
    assert is_structural(text, is_special=False)


@pytest.mark.parametrize(
    "text", ["<td>", "</h1>", "<br/>", "<=>", "<>", "[a]", "[1]", "[]", "< x >", "\n\n", "word", "<0x0A>"]
)
def test_tags_of_html_operators_bytes_and_words_are_text_unless_they_are_special(text):
    assert not is_structural(text, is_special=False)
    assert is_structural(text, is_special=True)


def forced(matcher):
    """The tokens that a form leaves no choice of, each of which its matcher takes."""
    tokens = []
    while run := matcher.compute_ff_tokens():
        assert matcher.try_consume_tokens(run) == len(run)
        tokens += run
    return tokens


@given(
    text=st.text(st.sampled_from("▁ aé<>|日\n"), min_size=1, max_size=8), added=added_tokens("<tool_call>")
)
def test_a_text_is_forced_to_its_last_character_with_what_blanks_are_written_as(base, text, added):
    tokenizer = with_added(base, added)
    for wanted in (text, f"{text}<tool_call>", f"<tool_call>{text}"):
        tokens = forced(compiler_of(tokenizer).matcher(grammar_of(StructuredOutputs(choice=[wanted]))))
        before = tokenizer.encode("a", add_special_tokens=False).ids
        assert tokenizer.decode([*before, *tokens]).removeprefix(tokenizer.decode(before)) == wanted


@pytest.mark.parametrize("end", ["</think>", "</think>\n\n", "So:</think>", "End:"])
@pytest.mark.parametrize("is_special", [False, True])
def test_a_form_begins_behind_the_token_that_ends_the_reasoning(base, end, is_special):
    tokenizer = with_added(base, [Added("<think>", is_special, 0), Added("</think>", is_special, 2)])
    ids = {text: tokenizer.token_to_id(text) for text in ("<think>", "</think>")}
    compiler = compiler_of(tokenizer)
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    form = StructuredOutputs(json=schema, compact=True, reasoning_begin="<think>", reasoning_end=end)
    matcher = compiler.matcher(grammar_of(form, StructuralTokens(ids)))
    assert ids["<think>"] in allowed(matcher)
    for piece in re.split("(</?think>|.)", f"<think>Hm [1,1] </ {end}[1,", flags=re.DOTALL):
        if piece:
            assert id_of(piece, tokenizer) in allowed(matcher), piece
            assert matcher.consume_token(id_of(piece, tokenizer))
    assert id_of("2", tokenizer) in allowed(matcher)
    assert matcher.consume_token(id_of("1", tokenizer))
    assert id_of(",", tokenizer) not in allowed(matcher)  # 1 came before
