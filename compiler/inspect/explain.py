"""What was compiled, in words: pieces, passes, kernels, guards."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..execution.plan import Compiled


def explain_text(compiled: Compiled) -> str:
    """One paragraph a unique piece, then the guards by what became of them."""
    uses = Counter(step.piece for step in compiled.plan.steps if step.piece is not None)
    lines = [
        f"{compiled.num_pieces} pieces, {len(compiled.plan.pieces)} of them unique; "
        f"{compiled.num_compiled} compiled, {compiled.num_loaded} loaded"
    ]
    if compiled.miss:
        lines.append(f"compiled because {compiled.miss}")
    lines += [f"{stage}: {seconds:.2f} s" for stage, seconds in compiled.seconds.items()]
    lines += ["\nthe whole model"] if compiled.plan.reports else []
    lines += _report_lines(compiled.plan.reports)
    for number, piece in enumerate(compiled.plan.pieces):
        artifact = piece.artifact
        origin = "compiled" if piece.was_compiled else "loaded"
        lines.append(f"\npiece {number}, used {uses[number]} times, {origin}, key {artifact.key[:16]}")
        lines += _report_lines(artifact.reports)
        lines += [f"  kernel {name}" for name in artifact.kernels]
    kinds = Counter(guard["disposition"] for guard in compiled.guards)
    lines.append("\nguards of the trace:")
    lines += [f"  {count} {disposition}" for disposition, count in sorted(kinds.items())]
    lines.append("\nwhat the plan depends on beside its weights, as read by the trace:")
    lines += [f"  {question}: {answer}" for question, answer in sorted(compiled.readings.items())]
    return "\n".join(lines)


def _report_lines(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each pass did, with the reasons it gave, each once and how often."""
    lines = []
    for report in reports:
        lines.append(f"  pass {report['name']}: {report['num_matches']} sites")
        for what, reasons in (("taken", report["chosen"]), ("left alone", report["skipped"])):
            lines += [
                f"    {what}: {reason}" if number == 1 else f"    {what}, {number} times: {reason}"
                for reason, number in Counter(reasons).items()
            ]
    return lines
