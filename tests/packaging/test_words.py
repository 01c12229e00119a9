"""The words are the field's: no metaphor of ours in code, tests or docs, and a grep finds what does what."""

import functools
import io
import re
import statistics
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CODE = {".py", ".h", ".cuh", ".cpp", ".cu"}

ROOMS = (
    *("benchmarks", "cli", "common", "compiler", "csrc", "custom_ops", "docs", "examples", "models"),
    *("runtime", "serving", "src", "testing", "tests"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"),
)

# What names must not be made of, one part of a name between underscores, and what is said instead.
NAMES = {
    "borders?": "limit, bound, or the input processor",
    "cards?": "gpu, device",
    "coming": "admitted, or in flight",
    "leaving": "pending free, exit",
    "products": "gemms",
    "recordings?": "decision log, or graph",
    "sides": "KV-cache groups",
    "tapes?": "CPU call graph",
    "tellers?": "output processor",
    "told": "sent, reported, written",  # not in tests, in which callbacks are told and commands tell
    "untold": "resend",
}
# What neither names nor comments nor docs say.
PHRASES = {
    r"\bborders?\b": "limit, bound, boundary",
    r"\bcards?\b": "GPU, device",
    r"\btapes?\b": "CPU call graph",
    r"\bteller\b": "output processor",
    r"\b(is|be|been|was|were) let in\b": "admitted",
    r"\btokens? on (its|their) way\b": "in flight",
    r"\buntold\b": "to be sent again",
    r"\brecordings?\b": "CUDA graphs, or the decision log",
    r"\brecord(ed|s)? (calls?|sizes?|steps?)\b": "captured",
    r"\bmatrix (products?|units?)\b": "GEMM, tensor cores",
    r"\btile units?\b": "AMX",
    r"\bblocks that stay\b|\bstaying blocks?\b": "persistent kernel",
    r"\b(lanes?|warps?) that brings?\b|\bbringing (lanes?|warps?)\b": "producer warp",
    r"\bresident (kernels?|gemms?|blocks?)\b|\bstreaming (kernels?|gemms?)\b": "persistent kernel, split-K",
    r"\bsides? of the (kv )?cache\b": "KV-cache group",
}


@functools.cache
def sources() -> list[Path]:
    """What git holds of the rooms, without figures and drawings."""
    listed = subprocess.run(["git", "ls-files", "-z", *ROOMS], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no repository, so no list of what belongs to it")
    paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    return [path for path in paths if path.suffix in CODE | {".md", ""} and path.is_file()]


def clean() -> list[Path]:
    """What must hold none of the words: all but this file, which has to quote them."""
    return [path for path in sources() if path != Path(__file__)]


@functools.cache
def small_letters(path: Path) -> str:
    return path.read_text().lower()


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def names(path: Path) -> Iterator[tuple[int, str]]:
    """Identifiers of a file of code with their lines, but for tests, whose names are sentences."""
    text = path.read_text()
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME and not token.string.startswith("test_"):
                yield token.start[0], token.string
    else:
        for number, line in enumerate(text.splitlines(), 1):
            yield from ((number, name) for name in re.findall(r"[A-Za-z_]\w*", line.split("//")[0]))


def parts(name: str) -> list[str]:
    """The words of a name, in small letters: snake_case, CamelCase and kConstants alike."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")


def is_metaphor(name: str, path: Path) -> bool:
    """Whether a part of a name is one of NAMES."""
    found = [part for part in parts(name) if re.fullmatch("|".join(NAMES), part)]
    return bool(found) and (found != ["told"] or not name_of(path).startswith("tests/"))


def test_no_name_is_a_metaphor_of_ours():
    offenders = {
        f"{name_of(path)}:{number}: {name}"
        for path in clean()
        if path.suffix in CODE
        for number, name in names(path)
        if is_metaphor(name, path)
    }
    assert not offenders, NAMES


def test_no_file_is_called_by_one():
    assert not [name_of(path) for path in clean() if is_metaphor(path.stem, path)]


def test_no_comment_and_no_page_speaks_in_metaphors_of_ours():
    left_out = re.compile("|".join(PHRASES), re.IGNORECASE)
    offenders = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in clean()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if left_out.search(line.replace("_", " "))
    ]
    assert not offenders, PHRASES


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("untold_rows", True),
        ("_told", True),
        ("CardMemory", True),
        ("kTapeSize", True),
        ("num_sides", True),
        ("cardinality", False),
        ("tapered", False),
        ("padding_side", False),
        ("scaled_dot_product_attention", False),
    ],
)
def test_a_name_is_known_by_its_parts(name, says):
    assert is_metaphor(name, ROOT / "runtime" / "runtime.py") is says


# What somebody who knows vLLM looks for, and the file that does it: a grep for the words must end there.
IMPLEMENTED_IN = {
    "block table": ["runtime/kv_cache/manager.py", "runtime/worker/input_batch.py"],
    "chunked prefill": ["runtime/scheduler/planner.py"],
    "CUDA graph": ["compiler/execution/cuda_graphs.py", "runtime/worker/graph_runner.py"],
    "CUDA graph capture": ["compiler/execution/cuda_graphs.py"],
    "detokenizer": ["runtime/tokenization/detokenizer.py"],
    "GEMM autotune": ["custom_ops/linear/autotune.py"],
    "input processor": ["runtime/engine/input_processor.py"],
    "KV-cache group": ["runtime/kv_cache/manager.py", "runtime/worker/attention.py"],
    "logits processor": ["runtime/worker/logits_processors.py"],
    "online softmax": ["csrc/paged_attention/hopper_softmax.cuh", "csrc/paged_attention/warp_softmax.cuh"],
    "output processor": ["runtime/engine/output_processor.py"],
    "persistent kernel": ["csrc/include/persistent_gemm.cuh"],
    "preemption": ["runtime/scheduler/live_requests.py"],
    "prefix cache": ["runtime/kv_cache/prefix_cache.py"],
    "request queue": ["runtime/scheduler/request_queue.py"],
    "running batch": ["runtime/scheduler/running_batch.py"],
    "slot mapping": ["runtime/worker/input_batch.py", "custom_ops/write_kv_cache/op.py"],
    "split-K": ["csrc/include/split_k_gemm.cuh"],
    "stop string": ["runtime/tokenization/detokenizer.py"],
}


def pages_and_code(words: str) -> tuple[list[str], list[str]]:
    """Where a grep for some words, in letters of any size, finds them: in docs, and in sources."""
    found = [name_of(path) for path in sources() if words.lower() in small_letters(path)]
    library = [name for name in found if not name.startswith(("tests/", "benchmarks/", "docs/"))]
    return [name for name in found if name.startswith("docs/")], library


@pytest.mark.parametrize("words", IMPLEMENTED_IN)
def test_a_grep_for_a_word_of_the_field_ends_where_it_is_implemented(words):
    docs, library = pages_and_code(words)
    assert docs, "no page has it"
    assert not set(IMPLEMENTED_IN[words]) - set(library)


@pytest.mark.parametrize("words", IMPLEMENTED_IN)
def test_the_glossary_has_every_word(words):
    assert words.lower() in (ROOT / "docs" / "glossary.md").read_text().lower()


def test_kernels_are_as_short_as_python():
    """No file of csrc is over 400 lines; half of its functions are far below 60."""
    kernels = [path for path in sources() if name_of(path).startswith("csrc/")]
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in kernels}
    assert not {name: length for name, length in lengths.items() if length > 400}
    functions = {
        f"{name_of(path)}:{number}": length for path in kernels for number, length in bodies(path.read_text())
    }
    assert statistics.median(functions.values()) < 10
    assert not {where: length for where, length in functions.items() if length > 60}


def bodies(text: str) -> Iterator[tuple[int, int]]:
    """First line and length of each function of clang-formatted C++: from the line of its `{` to its `}`."""
    opened: list[tuple[int, bool]] = []
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split("//")[0].rstrip()
        for brace in re.findall(r"[{}]", code):
            if brace == "{":
                opened.append((number, bool(re.search(r"\)[\w \->:]*\{$", code)) and not CONTROL.match(code)))
            else:
                first, is_function = opened.pop()
                if is_function:
                    yield first, number - first + 1


CONTROL = re.compile(r"\s*(\} )?(if|else|for|while|switch|do|namespace|struct|extern|#pragma)\b")
