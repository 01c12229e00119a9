"""What a GGUF file's metadata says of its tokenizer, checked."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...common.errors import LoadError, UnsupportedError
from ...common.logging import get_logger
from ..fields import INT32_MAX, Fields
from .gguf_pretokenizer import DEFAULT, PRE_TOKENIZERS, PreTokenizer

if TYPE_CHECKING:
    from .gguf_file import GGUFFile

logger = get_logger("models")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens, as the file numbers them
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"  # tokenizer.ggml.model
# Roles of tokens, as the file names them and as tokenizer_config.json does.
ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "seperator": "sep", "padding": "pad"}
ROLES |= {name: name for name in ("cls", "mask")}
SENTENCEPIECE_ROLES = {"bos": 1, "eos": 2, "unknown": 0}  # where the file names none
REMEDY = "name a folder with the model's tokenizer with --tokenizer, in Python tokenizer="
# Tokens that end an answer by their text, as llama.cpp has them.
END_TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "</s>"),
        *("<|end_of_text|>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>"),
        *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<turn|>", "<|tool_response>"),
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)
# Of models that fill in code: the first token of each kind ends an answer, unless the metadata name another.
FILL_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
FILL_PARTS = {
    *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "<|code_prefix|>", "<|prefix|>"),
    *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "<|code_suffix|>", "<|suffix|>"),
    *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "<|code_middle|>", "<|middle|>"),
}
MARKS = END_TEXTS.union(FILL_PARTS, *FILL_ENDS.values())  # never ordinary text
# Where all of the first are, the second is inside of answers.
NO_ENDS = (
    ({"<|return|>", "<|call|>"}, "<|end|>"),
    ({"<|return|>", "<|calls|>"}, "<|end|>"),
    ({"<|call|>", "<|flush|>"}, "<|end|>"),
    ({"<|calls|>", "<|flush|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """What the metadata says of the tokenizer, checked; ids are places in `texts`."""

    origin: str
    model: str
    pre: PreTokenizer
    texts: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[tuple[str, str]]  # of a byte-level model, the first to be merged first
    roles: Mapping[str, int]
    add_bos: bool
    add_eos: bool
    space_prefix: bool
    strips_after_control: bool  # blanks after a control token are dropped

    @property
    def special_ids(self) -> list[int]:
        """Tokens that are found in a text before it is cut."""
        kinds = (CONTROL, USER_DEFINED, UNKNOWN)
        return [token_id for token_id, kind in enumerate(self.types) if kind in kinds]


def read_vocabulary(file: "GGUFFile") -> Vocabulary:
    """The metadata as one checked object."""
    fields = Fields(file.metadata, str(file.path))
    model = fields.text("tokenizer.ggml.model")
    if model not in (BYTE_LEVEL, SENTENCEPIECE):
        raise UnsupportedError(
            f"{file.path}: tokenizer.ggml.model is {model!r:.80}; wanted {BYTE_LEVEL} or {SENTENCEPIECE}, or "
            f"{REMEDY}"
        )
    texts = _texts(file)
    pre = _pre_tokenizer(file, fields) if model == BYTE_LEVEL else PreTokenizer(expressions=(), add_bos=True)
    roles = _roles(file, model, len(texts))
    is_phi3 = re.search("phi-?3", str(file.metadata.get("general.name", "")).lower()) is not None
    vocabulary = Vocabulary(
        origin=str(file.path),
        model=model,
        pre=pre,
        texts=texts,
        types=_types(file, texts),
        scores=_list(file, "scores", (float, int), len(texts), 0.0) if model == SENTENCEPIECE else (),
        merges=_merges(file) if model == BYTE_LEVEL else (),
        roles=roles,
        add_bos=fields.boolean("tokenizer.ggml.add_bos_token", pre.add_bos),
        add_eos=fields.boolean("tokenizer.ggml.add_eos_token", False),
        space_prefix=model == SENTENCEPIECE and fields.boolean("tokenizer.ggml.add_space_prefix", True),
        strips_after_control=model == SENTENCEPIECE and is_phi3,
    )
    for role, is_added in (("bos", vocabulary.add_bos), ("eos", vocabulary.add_eos)):
        if is_added and role not in roles:
            raise LoadError(
                f"{file.path}: texts get a {role.upper()} token (tokenizer.ggml.add_{role}_token, or as "
                f"tokenizer.ggml.pre has it), but no tokenizer.ggml.{role}_token_id names one"
            )
    return vocabulary


def end_token_ids(file: "GGUFFile") -> list[int]:
    """Ids of the tokens that end an answer: those that the metadata name, then others by their text."""
    given = file.metadata.get("tokenizer.ggml.tokens")
    texts = given if isinstance(given, list) else []
    named = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    size = len(texts) or INT32_MAX
    ids = [i for i in named if isinstance(i, int) and 0 <= i < size]
    ids += [i for i, text in enumerate(texts) if text in END_TEXTS]
    for name, known in FILL_ENDS.items():
        own = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        found = [i for i, text in enumerate(texts) if text in known]
        ids += [own] if isinstance(own, int) and 0 <= own < len(texts) else found[:1]
    inside = _inside(texts)
    return [i for i in dict.fromkeys(ids) if not texts or texts[i] not in inside]


def _inside(texts: Sequence[str]) -> set[str]:
    """Texts that end no answer in this vocabulary."""
    known = set(map(str, texts))
    return {text for others, text in NO_ENDS if others <= known}


def _pre_tokenizer(file: "GGUFFile", fields: Fields) -> PreTokenizer:
    name = fields.text("tokenizer.ggml.pre", "")
    if not name:
        logger.warning(
            "%s does not say how its texts are cut (tokenizer.ggml.pre); they are cut as by llama.cpp's "
            "default, which may not be what the model was trained with",
            file.path,
        )
        return DEFAULT
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{file.path}: tokenizer.ggml.pre is {name!r:.80}, which is not known; known are "
            f"{', '.join(PRE_TOKENIZERS)}; {REMEDY}"
        )
    return PRE_TOKENIZERS[name]


def _texts(file: "GGUFFile") -> list[str]:
    given = _list(file, "tokens", (str,), None, "")
    if not given:
        raise LoadError(f"{file.path}: tokenizer.ggml.tokens is empty; download the file again, or {REMEDY}")
    texts = [text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(given)]
    if len(set(texts)) != len(texts):
        twice = next(text for place, text in enumerate(texts) if texts.index(text) != place)
        raise LoadError(
            f"{file.path}: tokenizer.ggml.tokens has {twice!r:.80} twice; wanted one id a text; {REMEDY}"
        )
    return texts


def _types(file: "GGUFFile", texts: Sequence[str]) -> list[int]:
    """The type of each token; what is known to end an answer is never ordinary text."""
    types = _list(file, "token_type", (int,), len(texts), NORMAL)
    marks = MARKS - _inside(texts)
    return [
        CONTROL if kind == NORMAL and text in marks else kind for kind, text in zip(types, texts, strict=True)
    ]


def _merges(file: "GGUFFile") -> list[tuple[str, str]]:
    """Pairs; a token may begin with a space."""
    merges = _list(file, "merges", (str,), None, "")
    places = [merge.find(" ", 1) for merge in merges]
    if -1 in places:
        wrong = merges[places.index(-1)]
        raise LoadError(f"{file.path}: tokenizer.ggml.merges has {wrong!r:.80}; wanted two tokens; {REMEDY}")
    return [(merge[:place], merge[place + 1 :]) for merge, place in zip(merges, places, strict=True)]


def _list(
    file: "GGUFFile", name: str, kinds: tuple[type, ...], length: int | None, default: Any
) -> list[Any]:
    """A list of one kind of values; where it is missing, the default once for each token."""
    found: Any = file.metadata.get(f"tokenizer.ggml.{name}")
    if found is None and length is not None:
        return [default] * length
    is_right = isinstance(found, list) and set(map(type, found)) <= set(kinds)
    if not is_right or (length is not None and len(found) < length):
        wanted = f"{length or ''} {' or '.join(kind.__name__ for kind in kinds)}"
        given = f"{len(found)} values" if isinstance(found, list) else f"{found!r:.40}"
        raise LoadError(
            f"the tokenizer of {file.path} cannot be read: tokenizer.ggml.{name} is {given}; wanted a list "
            f"of {wanted.strip()}; download the file again, or {REMEDY}"
        )
    return list(found[:length])


def _roles(file: "GGUFFile", model: str, size: int) -> dict[str, int]:
    """Ids by role; one beyond the vocabulary is none, as files have it that were written with -1."""
    defaults = {role: i for role, i in SENTENCEPIECE_ROLES.items() if i < size}
    roles = dict(defaults) if model == SENTENCEPIECE else {}
    for role in ROLES:
        name = f"tokenizer.ggml.{role}_token_id"
        found = file.metadata.get(name)
        if found is None:
            continue
        if isinstance(found, int) and 0 <= found < size:
            roles[role] = found
            continue
        logger.warning(
            "%s: %s is %.40r; wanted an id below %d, so it is ignored", file.path, name, found, size
        )
    return roles
