"""python -m tests.mutants: how many mutants of the kernels the ops' own tests catch, and which live."""

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.update({"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"})

from .equivalents import Equivalents
from .pool import Case, Verdict, cases, run_all

WANTED = 0.98


def main() -> int:
    """Run what was asked for; 1 where a mutant lives of which nobody says why, or too many do."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once (default: 1)")
    parser.add_argument("--ops", nargs="+", metavar="OP", help="folders of csrc, headers as include/NAME.h")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="the I-th of N equal parts")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no mutant after so many")
    parser.add_argument("--results", type=Path, help="verdicts, a line each, added to those it holds")
    parser.add_argument("--summary", action="store_true", help="run nothing: print what the results say")
    options = parser.parse_args()
    started = time.monotonic()
    index, count = map(int, options.share.split("/"))
    known = _read(options.results)
    wanted = cases(options.ops)[index - 1 :: count]
    todo = [] if options.summary else [case for case in wanted if case.name not in known]
    print(f"{len(wanted)} mutants, {len(wanted) - len(todo)} known", flush=True)
    for case, verdict in run_all(todo, options.jobs, started + 60 * options.minutes):
        known[case.name] = verdict
        if options.results is not None:
            with options.results.open("a") as file:
                file.write(json.dumps([case.name, verdict.value]) + "\n")
    return _report(wanted, known, time.monotonic() - started)


def _read(path: Path | None) -> dict[str, Verdict]:
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {name: Verdict(verdict) for name, verdict in lines}


def _report(wanted: list[Case], known: dict[str, Verdict], seconds: float) -> int:
    equivalents, counts, living = Equivalents(), Counter[tuple[str, Verdict]](), []
    for case in wanted:
        verdict = known.get(case.name)
        if verdict is None:
            continue
        if verdict is Verdict.LIVES and equivalents.explains(case):
            verdict = Verdict.ARGUED
        counts[case.folder, verdict] += 1
        if verdict is Verdict.LIVES:
            living.append(case)
    for case in living:
        print(f"lives: {case.name}")
    for folder in sorted({folder for folder, _ in counts}):
        print(_line(folder, {verdict: counts[folder, verdict] for verdict in Verdict}))
    total = {verdict: sum(counts[key] for key in counts if key[1] is verdict) for verdict in Verdict}
    left = sum(case.name not in known for case in wanted)
    print(_line("all", total), f"in {seconds:.0f} s; {left} not run")
    killed, survived = total[Verdict.KILLED], total[Verdict.LIVES]
    return int(bool(living) or killed < WANTED * (killed + survived))


def _line(name: str, of: dict[Verdict, int]) -> str:
    killed, total = of[Verdict.KILLED], of[Verdict.KILLED] + of[Verdict.LIVES]
    rest = f"{of[Verdict.ARGUED]} argued, {of[Verdict.SAME]} compile to the same, {of[Verdict.NO_CPP]} no C++"
    return f"{name}: {killed} killed of {total} ({killed / total if total else 1:.1%}); besides {rest}"


if __name__ == "__main__":
    sys.exit(main())
