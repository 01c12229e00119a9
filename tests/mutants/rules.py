"""Mutants of C++ and CUDA by rules of syntax: roundings, bounds, masks, scales, sums and offsets moved.

One of a kind a place: of the offsets in a line one is dropped, a loop loses its last round, a comparison
includes its bound or excludes it, and a condition is opened only where no comparison in it is moved already.
What cannot change a result has no mutants: see QUICKER.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

OPENING = {"(": ")", "[": "]", "{": "}"}
SWAPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
COMPARED = re.compile(r"(?<= )(<=?|>=?|==|!=)(?=\s)")
EXTREMES = ("min", "max"), ("fmin", "fmax"), ("fminf", "fmaxf"), ("atomicMin", "atomicMax")
# What only the compiler or the launch sees, and constants whose sums static assertions and launches check.
SKIPPED = re.compile(
    r"\bstatic_assert\(|\b(?:enum class|typedef) [^;]*;"
    r"|\basm\b[^(]*\(|__launch_bounds__\(|\btemplate <|\balignas\("
    r"|(?:static |inline )*\bconstexpr [\w:<>, ]+ \w+ ="
)
# What decides when, where and by whom a result is computed, and not what it is.
QUICKER = re.compile(
    # what is in caches already
    r"(?:\b\w+\[\w+\]\.|\b)\w*prefetch\w*\(|\bAhead \w+\{[^;]*\}|\b\w+ (?:ahead|early) ="
    r"|\bif \((?=(?:--)?ahead\b)|\bahead\.\w+ =|\bahead \* [\w.]+"
    # whether threads are woken
    r"|\bbool parallel =|\bdouble work =|\bwork \+="
    # how much memory is taken, or how long an array is
    r"|\.reserve\(|^ +size_t \w+ =|\bsize_t packed_\w+\([^}]*\}"
    r"|^ +(?:__shared__ |\x01+ )*[\w:<>, ]+ \w+(?:\[[^\]\n]*\])+(?= = \{\};|;)"
    # which of the ways that give the same, and how many at once
    r"|\bmethod == [\w:]+|\bhas_\w+\(\)|\b\w+<[^<>;()]*[*/+-][^<>;()]*>(?=\()",
    re.MULTILINE,
)
HEAD = re.compile(r"\bfor \(")
GONE = "\x01"  # stands in the place of what has no mutants
QUIET = re.compile(
    r'//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL | re.MULTILINE
)
BINARY = re.compile(r"(?<=[\w)\]}] )(\+|-|\*|/|%|<<|>>|&|\||\^)(?=\s)")
ROUNDED_UP = re.compile(r" (\+) [\w:.]+(?: \* [\w:.]+)? - 1\) / |\((\+) [^()]*\([^()]*\) - 1\) / ")
STEP = re.compile(
    r"k[A-Z]\w+|[\w.]*(?:stride|strides\.\w+|outer|token|head|dim_?|width|num_\w+|block_size|group_?)"
)
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
    changes = sorted(
        {*shortened_loops(code), *(change for rule in RULES for change in rule(_without_heads(code)))}
    )
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
    for pattern in (SKIPPED, QUICKER):
        for found in list(pattern.finditer(code)):
            code = _blanked(code, found.start(), _end_of_skipped(code, found))
    return code


def _blanked(code: str, start: int, end: int) -> str:
    return code[:start] + re.sub(r"[^\n]", GONE, code[start:end]) + code[end:]


def _end_of_skipped(code: str, found: re.Match[str]) -> int:
    if found[0].endswith("("):
        return closing(code, found.end() - 1) + 1
    if found[0].endswith("="):
        return code.find(";", found.end())
    depth, at = int(found[0].endswith("<")), found.end()
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


def _heads(code: str) -> Iterator[tuple[int, list[str]]]:
    """Where the bracket of each loop that counts begins, and its three parts."""
    for found in HEAD.finditer(code):
        parts = code[found.end() : closing(code, found.end() - 1)].split(";")
        if len(parts) == 3:
            yield found.end(), parts


def _without_heads(code: str) -> str:
    for start, parts in list(_heads(code)):
        code = _blanked(code, start, start + len(";".join(parts)))
    return code


def shortened_loops(code: str) -> Iterator[Change]:
    """A loop's last round is not run; one round more would often see no elements, and do nothing."""
    for start, (first, condition, step) in _heads(code):
        taken = re.match(r" (\w+) [+]= ([^,]+)| (?:[+]{2})?(\w+)(?:[+]{2})?(?=,|$)", step)
        compared = COMPARED.search(condition)
        if taken is None or compared is None or GONE in condition:
            continue
        sign, opposite = "+-" if compared[1][0] == "<" else "-+"
        begin = start + len(first) + 1
        if "&&" in condition:
            yield begin + compared.start() - 1, begin + compared.start(), f" {sign} {taken[2] or 1} "
        else:
            yield begin + len(condition), begin + len(condition), f" {opposite} {taken[2] or 1}"


def dropped_terms(code: str) -> Iterator[Change]:
    """a + b becomes a, and so for every operator; a division that rounds up rounds down."""
    for found in ROUNDED_UP.finditer(code):
        end = code.rindex(")", 0, found.end())
        yield found.start(), end, ""
        code = code[: found.start()] + re.sub(r"[-+/]", GONE, found[0]) + code[found.end() :]
    whole = -1  # where the last term that was dropped ends
    for found in BINARY.finditer(code):
        start = re.compile(r"\S").search(code, found.end())
        assert start is not None
        end = operand_end(code, start.start())
        if found[1] in "+-":
            is_further = "\n" not in code[max(whole, 0) : found.start()] and whole >= 0
            while factor := FACTORS.match(code, end):
                end = operand_end(code, factor.end())
            whole = max(whole, end)
            if is_further:
                continue  # of a line one is enough
        elif end <= whole and STEP.fullmatch(code[start.start() : end]):
            continue  # the step of an offset that is dropped whole
        if end > start.start():
            yield found.start() - 1, end, ""


def moved_bounds(code: str) -> Iterator[Change]:
    """A comparison includes its bound or excludes it, and the smaller of two is the larger."""
    for found in COMPARED.finditer(code):
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
    """A condition of flags always holds; one with a comparison is moved by that."""
    for found in re.finditer(r"\bif \((?=\S)", code):
        end = closing(code, found.end() - 1)
        condition = code[found.end() : end]
        if (
            GONE not in condition
            and not COMPARED.search(condition)
            and not re.match(r"(?:const )?\w+ \w+ =", condition)
        ):
            yield found.end(), end, f"({condition}) || true"
    for found in re.finditer(r"(?<=[\w)\]]) \?(?=\s)", code):
        if not COMPARED.search(_condition_before(code, found)):
            yield found.start(), found.end(), " || true ?"


def _condition_before(code: str, found: re.Match[str]) -> str:
    at, depth = found.start(), 0
    while at and not (depth == 0 and code[at - 1] in "([{;?:,="):
        at -= 1
        depth += {")": 1, "]": 1, "}": 1, "(": -1, "[": -1, "{": -1}.get(code[at], 0)
        if depth == 0 and code[at - 1] == "=" and code[at - 2] in "<>=!":
            at -= 2
    return code[at : found.start()]


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
    """What begins at 0 begins at 1, and the first element is the second: of a line one."""
    line = -1
    for found in re.finditer(r"(?<= = )0(?:\.0f)?(?=[;,])|(?<=\w\[)[01](?=\][^;=]*[;=,)])", code):
        if code[found.start() - 1] == "[" and re.search(
            r"\w[\w:<>]*[*&]? \w+\[$", _statement_before(code, found)
        ):
            continue  # declares an array
        if "\n" in code[max(line, 0) : found.start()] or line < 0:
            yield found.start(), found.end(), {"0": "1", "1": "0", "0.0f": "1.0f"}[found[0]]
        line = found.end()


def _statement_before(code: str, found: re.Match[str]) -> str:
    before = code[max(0, found.start() - 200) : found.start()]
    statement = re.split(r"[;{}()=,]|\breturn\b", before)[-1]
    return statement.replace("const ", "").strip(" \n")


RULES = dropped_terms, moved_bounds, opened_masks, lost_roundings, forgotten_sums, moved_offsets
