"""What tokenizer.ggml.pre of a GGUF file stands for: where a text is cut before its bytes are merged."""

from collections.abc import Sequence
from dataclasses import dataclass

# The same cuts as llama.cpp makes, whose name in the file this is. A text is cut by each expression in turn:
# what it matches is a piece, and so is what lies between two matches. Expressions are Oniguruma's.
CONTRACTION = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
SPACES = r"\s+(?!\S)|\s+"
LINES_AND_SPACES = rf"\s*[\r\n]+|{SPACES}"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
# Of each number the groups of three count from its end; the first takes what stands before the number.
GROUPS_OF_THREE = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"

GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{SYMBOLS}|{SPACES}"
DIGIT_THEN_GPT2 = (r"\p{N}", GPT2)
LLAMA3 = rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{SYMBOLS}[\r\n]*|{LINES_AND_SPACES}"
QWEN2 = rf"{CONTRACTION}|{WORD}|\p{{N}}|{SYMBOLS}[\r\n]*|{LINES_AND_SPACES}"
QWEN35 = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{LINES_AND_SPACES}"
)
JAIS2_SPACES = "|".join(
    [*(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4)), r"\s{1,2}(?!\S)", r"\s"]
)
JAIS2 = rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{SYMBOLS}[\r\n]*|\s*[\r\n]+|{JAIS2_SPACES}"
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
DEEPSEEK3 = (
    rf"{ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{LINES_AND_SPACES}"
)
SPARK = DEEPSEEK3.replace(r"[\r\n]*|\s*[\r\n]+|", r"|[\r\n]|")
# Blanks between U+0800 and U+4E00 are left out: llama.cpp sees blanks before it sees scripts.
DEEPSEEK_CJK = "(?:(?!\\s)[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff])+"
# Letters with two cases, as of the Unicode that the model was made with.
DEEPSEEK_WORD = (
    r"\s?[A-Za-z"
    "\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d"
    "\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f"
    "\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)
# Not the ideographic space at U+3000: llama.cpp takes it for a blank before the symbols.
DEEPSEEK_SYMBOLS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+"


def _cased(letters: str, suffix: str, numbers: str, symbols_end: str = r"[\r\n/]*") -> str:
    """Words that end where a small letter is followed by a capital; beyond ASCII there are no cases."""
    upper, lower = rf"(?:(?={letters})[^a-z])", rf"(?:(?={letters})[^A-Z])"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}"
        rf"|{numbers}|{SYMBOLS}{symbols_end}|{LINES_AND_SPACES}"
    )


def _uncased(suffix: str, numbers: str) -> str:
    """Words of letters and marks; the categories of letters are one."""
    return rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{suffix}|{numbers}|{SYMBOLS}[\r\n/]*|{LINES_AND_SPACES}"


TEKKEN = _cased(r"\p{L}", "", r"\p{N}")
GPT4O = _cased(r"\p{L}", f"{CONTRACTION}?", r"\p{N}{1,3}")
YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{CJK}"
)
AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
HAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b820-\U0002ceaf\U0002ceb0-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f]"
)
KIMI = (
    rf"{HAN}+|[^\r\n\p{{L}}\p{{N}}]?(?:(?!{HAN})\p{{L}})+{CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{SYMBOLS}[\r\n]*|{LINES_AND_SPACES}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreTokenizer:
    """Where a text is cut, and what holds where the file says nothing else."""

    expressions: Sequence[str]
    ignore_merges: bool = False  # a piece that is a token is that token, whatever the merges would make of it
    add_bos: bool = False


def _pre(*expressions: str, ignore_merges: bool = False, add_bos: bool = False) -> PreTokenizer:
    return PreTokenizer(expressions=expressions, ignore_merges=ignore_merges, add_bos=add_bos)


DEFAULT = _pre(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_LLAMA3 = _pre(LLAMA3, ignore_merges=True, add_bos=True)
_GPT2 = _pre(GPT2)
_SMOLLM = _pre(*DIGIT_THEN_GPT2)
_QWEN2 = _pre(QWEN2)
_DEEPSEEK3 = _pre(r"\p{N}{1,3}", CJK, DEEPSEEK3)
_BAILING = _pre(
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
    rf"|{WORD}|\p{{N}}|{SYMBOLS}[\r\n]*|\s*[\r\n]|{SPACES}"
)
_GPT4O = _pre(GPT4O)
_AYA = _pre(GROUPS_OF_THREE, _uncased(f"{CONTRACTION}?", r"\p{N}{1,3}"))

PRE_TOKENIZERS = {
    "default": DEFAULT,
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"), _LLAMA3),
    **dict.fromkeys(("midm-2.0", "lfm2", "jina-v5-nano"), _LLAMA3),
    "dbrx": _pre(LLAMA3),
    "smaug-bpe": _pre(LLAMA3),
    "chatglm-bpe": _pre(LLAMA3),
    "glm4": _pre(LLAMA3, ignore_merges=True),
    "glm5": _pre(LLAMA3, ignore_merges=True),
    "minicpm5": _pre(r"\p{N}{1,3}", QWEN2.replace(r"|\p{N}|", r"|\p{N}+|"), ignore_merges=True),
    "jais-2": _pre(JAIS2),
    "deepseek-llm": _pre(r"[\r\n]", DEEPSEEK_WORD, DEEPSEEK_SYMBOLS, r"\s+\z", DEEPSEEK_CJK, r"\p{N}+"),
    "deepseek-coder": _pre(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, r"\p{N}"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "spark2_5": _pre(r"\p{N}{1,3}", CJK, SPARK, r"\p{N}"),
    "youtu": _pre(YOUTU_SCRIPTS, _uncased(f"{CONTRACTION}?", r"\p{N}"), ignore_merges=True),
    "falcon": _pre(r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"), _SMOLLM),
    **dict.fromkeys(("minerva-7b", "mellum2"), _SMOLLM),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "gigachat", "a.x-4.0"), _GPT2),
    **dict.fromkeys(("mellum", "modern-bert", "trillion", "granite-docling", "roberta-bpe"), _GPT2),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code"), _GPT2),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2"), _QWEN2),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2"), _QWEN2),
    "qwen35": _pre(QWEN35),
    "laguna": _pre(r"[^\n]+|[\n]+", QWEN2),
    "ufakzeka": _pre(QWEN2.removeprefix(f"{CONTRACTION}|")),
    "seed-coder": _pre(rf"{CONTRACTION}|{WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{LINES_AND_SPACES}"),
    "exaone-moe": _pre(
        rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        rf"|{SYMBOLS}[\r\n/]?|\s*[\r\n]|{SPACES}"
    ),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _pre(BLOOM)),
    "viking": _pre(BLOOM, r"\p{N}"),
    "tekken": _pre(TEKKEN, ignore_merges=True, add_bos=True),
    "chameleon": _pre(
        "<sentinel:[0-9]+>",
        "(?:IMGIMG)(?:A|B|C|D|E|F|G|H|I){1,4}Z",
        r"[\t\n]|    |  ",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        GPT2,
        add_bos=True,
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    "granite-embed-multi-97m": _pre(
        _cased(r"[\p{L}\p{M}]", f"{CONTRACTION}?", r"\p{N}{1,3}"), ignore_merges=True
    ),
    "tiny_aya": _AYA,
    "cohere2moe": _AYA,
    "superbpe": _pre(r"\p{N}+", r"[0-9]{1,3}(?=(?:[0-9]{3})*(?![0-9]))"),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "kimi-k2": _pre(KIMI),
    "afmoe": _pre(GROUPS_OF_THREE, AFMOE_SCRIPTS, DEEPSEEK3),
}
