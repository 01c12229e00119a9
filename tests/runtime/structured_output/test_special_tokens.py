"""Text that is written as a special token is in a form what it is in an answer: text."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from lamina import RequestError, Runtime, SamplingParams, StructuredOutputs, UnsupportedError
from lamina.runtime.structured_output.compiler import GrammarCompiler
from lamina.runtime.structured_output.grammar import grammar_of

pytest.importorskip("llguidance")
WRITTEN = "<think>"  # an added token that is not special, and looks like one
NAMES = ["<unk>", "</s>", "<|im_end|>", "<｜tool▁call｜>", "[END]"]
PIECES = st.sampled_from(
    [*NAMES, WRITTEN, "e\u0301", "A", "<", "|>", "im_end", "[", "a text", "\n", '"', "é"]
)
TEXTS = st.lists(PIECES, min_size=1, max_size=6).map("".join)
MODELS = {"bpe": (models.BPE, trainers.BpeTrainer), "unigram": (models.Unigram, trainers.UnigramTrainer)}


@pytest.fixture(scope="module", params=["bpe", "bpe, added later", "unigram"])
def tokenizer(request):
    """Its special tokens are of the vocabulary, or behind it."""
    model, trainer = MODELS[request.param.split(",")[0]]
    found = Tokenizer(model())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    names = ["<unk>"] if "later" in request.param else NAMES
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    own = trainer(vocab_size=400, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    found.train_from_iterator(["a text of im_end and tools that are called"] * 3, own)
    found.add_special_tokens(NAMES)
    found.add_tokens([WRITTEN])
    found.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    return found


@pytest.fixture(scope="module")
def compiler(tokenizer):
    size = tokenizer.get_vocab_size()
    end = tokenizer.token_to_id("</s>")
    return GrammarCompiler(tokenizer.to_str, num_valid_ids=size, eos_token_ids=[end])


def forced(matcher):
    """The tokens that a form leaves no choice of."""
    tokens = []
    while run := matcher.compute_ff_tokens():
        assert matcher.try_consume_tokens(run) == len(run)
        tokens += run
    return tokens


def written(matcher, *, by):
    """The tokens of an answer of a form: what is forced, else one of those left, by their number."""
    tokens = []
    while not matcher.is_stopped():
        run = matcher.compute_ff_tokens() or [one_of(matcher.compute_bitmask(), by)]
        assert matcher.try_consume_tokens(run) == len(run)
        tokens += run
    return tokens


def one_of(mask, by):
    ids = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").nonzero()[0].tolist()
    return ids[by % len(ids)]


@given(text=TEXTS, by=st.integers(0, 999))
def test_a_text_that_is_forced_is_written_by_tokens_of_text(tokenizer, compiler, text, by):
    for form in (StructuredOutputs(choice=[text]), StructuredOutputs(json={"const": text}, compact=True)):
        tokens = written(compiler.matcher(grammar_of(form)), by=by)
        if tokens[-1] == tokenizer.token_to_id("</s>"):  # which may end an answer that is whole
            tokens.pop()
        assert not {tokenizer.token_to_id(name) for name in NAMES} & {*tokens}
        found = tokenizer.decode(tokens, skip_special_tokens=False)
        assert (found if form.choice else json.loads(found)) == text


@pytest.mark.parametrize("name", ["<|im_end|>", "<｜tool▁call｜>"])
def test_a_grammar_names_special_tokens_outside_its_strings(tokenizer, compiler, name):
    lark = f'start: "x{name}" {name} /y{name[1]}+/? // {name}'.replace("/y|+/", r"/y\|+/")
    tokens = forced(compiler.matcher(grammar_of(StructuredOutputs(grammar=lark))))
    assert tokens[-1] == tokenizer.token_to_id(name)
    assert tokenizer.token_to_id(name) not in tokens[:-1]


def test_a_comment_hides_neither_quotes_nor_tokens(tokenizer, compiler):
    lark = 'start: <|im_end|> "b" # don"t\n  | <|im_end|> "c" // "\n'
    tokens = forced(compiler.matcher(grammar_of(StructuredOutputs(grammar=lark))))
    assert tokens == [tokenizer.token_to_id("<|im_end|>")]


def test_a_tokenizer_that_is_not_read_is_refused_by_name(compiler):
    other = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words = GrammarCompiler(other.to_str, num_valid_ids=2, eos_token_ids=[1])
    with pytest.raises(UnsupportedError, match="structured_outputs needs a tokenizer that llguidance reads"):
        words.matcher(grammar_of(StructuredOutputs(choice=["a"])))


def test_a_special_token_that_there_is_not_is_said_with_those_that_there_are(compiler):
    with pytest.raises(RequestError, match=r"unknown special token.*<\|im_no\|>") as raised:
        compiler.matcher(grammar_of(StructuredOutputs(grammar='start: "x" <|im_no|>')))
    assert "<|im_end|>" in str(raised.value)
    assert "\U0010fffd" not in str(raised.value)


def test_an_answer_has_them_as_text(tiny_text_folder):
    with Runtime.from_pretrained(tiny_text_folder, dtype="float32", compile=False) as runtime:
        special = [*runtime.tokenizer.special_tokens.values()]
        text = f"before {special[0]} and {special[-1]}"
        schema = {"type": "object", "properties": {text: {"const": text}}, "required": [text]}
        schema["additionalProperties"] = False
        forms = {text: StructuredOutputs(choice=[text]), "json": StructuredOutputs(json=schema, compact=True)}
        for name, form in forms.items():
            params = SamplingParams(temperature=0, max_tokens=200, structured_outputs=form)
            answer = runtime.generate(["x"], params)[0].outputs[0]
            assert answer.finish_reason == "stop"
            assert answer.text == text if name == text else json.loads(answer.text)[text] == text
