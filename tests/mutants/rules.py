"""Mutants of C++ and CUDA by rules of syntax: roundings, bounds, masks, scales, sums and offsets moved."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

OPENING = {"(": ")", "[": "]", "{": "}"}
SWAPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&"}
EXTREMES = ("min", "max"), ("fmin", "fmax"), ("fminf", "fmaxf"), ("atomicMin", "atomicMax")
# What only the compiler or the launch sees, and constants whose sums static assertions and launches check.
SKIPPED = re.compile(
    r"\bstatic_assert\(|\basm\b[^(]*\(|__launch_bounds__\(|__builtin_prefetch\(|\btemplate <|\balignas\("
    r"|(?:static |inline )*\bconstexpr [\w:<>, ]+ \w+ ="
)
QUIET = re.compile(
    r'//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL | re.MULTILINE
)
BINARY = re.compile(r"(?<=[\w)\]}] )(\+|-|\*|/|%|<<|>>|&|\||\^)(?=\s)")
FACTORS = re.compile(r"\s+[*/%]\s+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One change of a source: where, what stood there and what stands there now."""

    line: int  # from 1
    start: int
    end: int
    new: str
    old_line: str  # stripped, before and after: what names the mutant where lines move
    new_line: str
    occurrence: int  # of several alike in a file

    def apply(self, text: str) -> str:
        """The source with the change in it."""
        return text[: self.start] + self.new + text[self.end :]


def mutants_of(text: str) -> list[Mutant]:
    """Every mutant of a source, in the order of its lines, each text once."""
    code = _code_of(text)
    changes = sorted({change for rule in RULES for change in rule(code)})
    found: list[Mutant] = []
    seen: dict[tuple[str, str], int] = {}
    for start, end, new in changes:
        first, last = text.rfind("\n", 0, start) + 1, text.find("\n", end)
        old_line = " ".join(text[first:last].split())
        new_line = " ".join((text[first:start] + new + text[end:last]).split())
        number = seen[old_line, new_line] = seen.get((old_line, new_line), -1) + 1
        found.append(
            Mutant(
                line=text.count("\n", 0, start) + 1,
                start=start,
                end=end,
                new=new,
                old_line=old_line,
                new_line=new_line,
                occurrence=number,
            )
        )
    return found


Change = tuple[int, int, str]


def _code_of(text: str) -> str:
    """The text with spaces in the place of what is not to be changed, every character where it was."""
    code = QUIET.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    for found in list(SKIPPED.finditer(code)):
        end = _end_of_skipped(code, found)
        code = code[: found.start()] + re.sub(r"[^\n]", " ", code[found.start() : end]) + code[end:]
    return code


def _end_of_skipped(code: str, found: re.Match[str]) -> int:
    if found[0].endswith("("):
        return closing(code, found.end() - 1) + 1
    if found[0].endswith("="):
        return code.find(";", found.end())
    depth, at = 1, found.end()
    while depth and at < len(code):  # template <…>
        depth += {"<": 1, ">": -1}.get(code[at], 0)
        at += 1
    return at


def closing(code: str, at: int) -> int:
    """Where the bracket at this place ends."""
    wanted = [OPENING[code[at]]]
    while wanted and (at := at + 1) < len(code):
        if code[at] in OPENING:
            wanted.append(OPENING[code[at]])
        elif code[at] == wanted[-1]:
            wanted.pop()
    return at


def operand_end(code: str, at: int) -> int:
    """Where the operand that begins here ends: names, literals, calls, members, elements, brackets, casts."""
    while code[at] in "-!~*&":
        at += 1
    while True:
        if code[at] in OPENING:
            at = closing(code, at) + 1
        elif word := re.compile(r"[\w.:']+(?:<[\w:, ]*>(?=[({]))?|->").match(code, at):
            at = word.end()
        else:
            return at


def dropped_terms(code: str) -> Iterator[Change]:
    """a + b becomes a, and a - b; so for every operator."""
    for found in BINARY.finditer(code):
        start = re.compile(r"\S").search(code, found.end())
        assert start is not None
        end = operand_end(code, start.start())
        if found[1] in "+-":
            while factor := FACTORS.match(code, end):
                end = operand_end(code, factor.end())
            yield found.start(), found.end(), "-" if found[1] == "+" else "+"
        if end > start.start():
            yield found.start() - 1, end, ""


def moved_bounds(code: str) -> Iterator[Change]:
    """A comparison takes its border or leaves it; of two conditions one is enough."""
    for found in re.finditer(r"(?<= )(<=?|>=?|==|!=|&&|\|\|)(?=\s)", code):
        yield found.start(), found.end(), SWAPPED[found[1]]
    for pair in EXTREMES:
        for old, new in (pair, pair[::-1]):
            for found in re.finditer(rf"\b{old}(?=[<(])", code):
                if not _is_definition(code, found):
                    yield found.start(), found.end(), new


def _is_definition(code: str, found: re.Match[str]) -> bool:
    start = code.rfind("\n", 0, found.start()) + 1
    return re.search(r"\b(?:inline|static|__device__)\b", code[start : found.start()]) is not None


def opened_masks(code: str) -> Iterator[Change]:
    """A condition that always holds, or never."""
    for found in re.finditer(r"\bif \(", code):
        if re.match(r"(?:const )?\w+ \w+ =", code[found.end() :]):
            continue  # declares what it asks
        end = closing(code, found.end() - 1)
        for suffix in (") || true", ") && false"):
            yield found.end(), end, f"({code[found.end() : end]}{suffix}"
    for found in re.finditer(r"(?<=[\w)\]]) \?(?=\s)", code):
        for suffix in (" || true ?", " && false ?"):
            yield found.start(), found.end(), suffix


def lost_roundings(code: str) -> Iterator[Change]:
    """What a step writes is not rounded to the type that it writes."""
    for found in re.finditer(
        r"\brounded(?:<[\w:]+>)?(?=\()|\b(?:std::)?(?:ceilf?|floorf?|nearbyintf?)(?=\()", code
    ):
        if not _is_definition(code, found):
            yield found.start(), found.end(), ""
    for found in re.finditer(r"\bround_to<\w+>\(\w+\)(?=;)", code):
        yield found.start(), found.end(), ""


def forgotten_sums(code: str) -> Iterator[Change]:
    """What is added to a sum takes its place."""
    for found in re.finditer(r"(?<= )(?:\+|-|\*|/|\||&|\^|<<|>>)=(?=\s)", code):
        yield found.start(), found.end(), "="


def moved_offsets(code: str) -> Iterator[Change]:
    """What begins at 0 begins at 1, and the first element is the second."""
    for found in re.finditer(r"(?<= = )0(?:\.0f)?(?=[;,])|(?<=\w\[)[01](?=\][^;=]*[;=,)])", code):
        if code[found.start() - 1] == "[" and re.search(
            r"\w[\w:<>]*[*&]? \w+\[$", _statement_before(code, found)
        ):
            continue  # declares an array
        new = {"0": "1", "1": "0", "0.0f": "1.0f"}[found[0]]
        yield found.start(), found.end(), new


def _statement_before(code: str, found: re.Match[str]) -> str:
    before = code[max(0, found.start() - 200) : found.start()]
    statement = re.split(r"[;{}()=,]|\breturn\b", before)[-1]
    return statement.replace("const ", "").strip(" \n")


RULES = dropped_terms, moved_bounds, opened_masks, lost_roundings, forgotten_sums, moved_offsets
