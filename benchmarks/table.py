"""The table of a result file; with --write, put into README.md between its two marks."""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "cpu.json"
MARKS = ("<!-- table of benchmarks/results/cpu.json -->", "<!-- end of table -->")


def render(document: dict[str, Any]) -> str:
    """Markdown: a row a workload, a column a contender, median (min to max) tokens a second."""
    contenders = sorted({row["contender"] for row in document["results"]})
    workloads = sorted({row["workload"] for row in document["results"]}, key=_natural)
    cells = {
        (
            row["workload"],
            row["contender"],
        ): f"{row['median']:g} ({row['min']:g} to {row['max']:g}){_tail(row)}"
        for row in document["results"]
    }
    lines = [["tokens/s", *contenders], ["---"] * (1 + len(contenders))]
    lines += [[load, *(cells.get((load, name), "") for name in contenders)] for load in workloads]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n" + _caption(document)


def _tail(row: dict[str, Any]) -> str:
    """How much longer a step in a hundred takes than the middle one, where steps were timed."""
    return f"; p99 {row['step_p99_ms'] / row['step_ms']:.1f} times a step" if "step_ms" in row else ""


def _natural(text: str) -> list[Any]:
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", text)]


def _caption(document: dict[str, Any]) -> str:
    machine, bandwidth = document["machine"], document["bandwidth_gb_s"]
    return (
        f"{document['model']} as {document['dtype']}, context {document['context']}, "
        f"median (min to max) of {len(document['results'][0]['samples'])} rounds, {document['date']}, "
        f"`{document['command']}` on {machine['cpu']}, {machine['threads']} threads, {machine['isa']}, "
        f"reading memory at {bandwidth['read']:g} GB/s; torch {machine['versions']['torch']}, "
        f"transformers {machine['versions']['transformers']}."
    )


def place(readme: str, table: str) -> str:
    """The readme with the table between the marks."""
    before, _, rest = readme.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n{table}\n{MARKS[1]}{after}"


def main() -> None:
    """Print the table, or with --write put it into README.md."""
    table = render(json.loads(RESULT.read_text()))
    if "--write" in sys.argv:
        readme = ROOT / "README.md"
        readme.write_text(place(readme.read_text(), table))
    else:
        print(table)


if __name__ == "__main__":
    main()
