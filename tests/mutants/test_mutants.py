"""The mutants of the kernels: what the rules change, and that a changed kernel fails its op's tests."""

import subprocess
import sys
from pathlib import Path

import pytest

from lamina.custom_ops._shared.build import CSRC

from ..custom_ops import host_kernels
from .equivalents import Equivalents
from .pool import Case
from .rules import mutants_of

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = """\
// a + b in a comment, "x < y" in
constexpr int kBlock = 4 * kRows;
template <int kWidth>
inline float norm(const float* x, int64_t n, float scale) {
  static_assert(kWidth < 9, "small");
  float sum = 0.0f;
  for (int64_t i = 0; i < n; i++) sum += rounded<T>(x[i + 1] * scale);
  return sum > 0.0f && n != 0 ? sum : max(scale, x[0]);
}
void run(float* x, int64_t n, bool is_scaled, float scale) {
  const int64_t steps = (n + kRows - 1) / kRows;
  if (is_scaled) x[steps] *= scale;
  const bool parallel = n > 64;
  __builtin_prefetch(x + n, 0, 2);
  double work = 0;
  work += 2.0 * n;
  if (--ahead.steps < 0) strips[1].prefetch(x, n - 1);
  ahead.steps = ahead.period - 1;
  alignas(64) float kept[kRows / 2][kRows];
}
"""


def test_every_rule_finds_its_places_and_none_in_what_does_not_run() -> None:
    lines = SOURCE.splitlines()
    found = {(mutant.line, mutant.new_line) for mutant in mutants_of(SOURCE)}
    loop, result, masked = (lines[at].strip() for at in (6, 7, 11))
    right = {
        (6, "float sum = 1.0f;"),
        *((7, loop.replace(*change)) for change in [("i < n", "i < n - 1"), ("+=", "="), ("i + 1", "i")]),
        *((7, loop.replace(*change)) for change in [("rounded<T>", ""), (" * scale", "")]),
        *((8, result.replace(*change)) for change in [(">", ">="), ("!=", "=="), ("[0]", "[1]")]),
        (8, result.replace("max", "min")),
        (11, "const int64_t steps = (n) / kRows;"),
        *(
            (12, masked.replace(*change))
            for change in [("(is_scaled)", "((is_scaled) || true)"), ("*=", "=")]
        ),
    }
    assert found == right


def test_a_mutant_is_the_source_with_one_change() -> None:
    for mutant in mutants_of(SOURCE):
        changed = mutant.apply(SOURCE)
        assert changed != SOURCE
        assert changed.splitlines()[mutant.line - 1].strip() == mutant.new_line


@pytest.mark.parametrize(
    "path", sorted(CSRC.rglob("*.[ch]*")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_every_source_can_be_changed_and_names_each_change_once(path: Path) -> None:
    mutants = mutants_of(path.read_text())
    assert len({(m.old_line, m.new_line, m.occurrence) for m in mutants}) == len(mutants)


@pytest.mark.skipif(host_kernels.COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("share", ["1/18", pytest.param("10/18", marks=pytest.mark.long)])
def test_mutants_of_a_kernel_are_killed_by_the_ops_own_tests(share: str) -> None:
    command = [sys.executable, "-m", "tests.mutants", "--ops", "write_kv_cache", "--share", share]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "write_kv_cache (C++)" in result.stdout
    assert "100.0%" in result.stdout.splitlines()[-1]


def test_every_argument_is_of_a_mutant_that_there_is() -> None:
    """A line that was rewritten takes its arguments with it."""
    equivalents = Equivalents()
    for entry in equivalents.entries:
        alone = Equivalents([entry])
        cases = [
            Case(file=entry["file"], mutant=mutant, targets=())
            for mutant in mutants_of((CSRC / entry["file"]).read_text())
        ]
        assert any(map(alone.explains, cases)), entry
        assert len(entry["reason"].split()) > 3
