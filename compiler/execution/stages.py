"""A plan cut behind attention calls: a stage has the steps of some layers, and values between are sent.

A cut makes no new piece: what surrounds it is code that the whole plan has too, so that all stages, and a
process that runs the whole, load the same plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...common.errors import CompileError, shown
from .plan import INPUTS, Plan, Step


def stage_of(plan: Plan, layers: range) -> Plan:
    """The steps of a plan from behind the attention before these layers up to that of the last of them.

    The first layers come with all steps before, the last ones with all behind. CompileError where the model
    calls its layers out of order, or hands on what is no tensor with a row a token.
    """
    if plan.layers != tuple(range(len(plan.layers))):
        raise CompileError(
            f"the model calls its layers in the order {shown(plan.layers)}; wanted ascending numbers, where "
            "stages share the layers out"
        )
    ends = [number + 1 for number, step in enumerate(plan.steps) if step.layer is not None]
    start = ends[layers.start - 1] if layers.start else 0
    stop = len(plan.steps) if layers.stop == len(plan.layers) else ends[layers.stop - 1]
    steps = plan.steps[start:stop]
    used = {name for step in steps for name in step.inputs}
    return replace(
        plan,
        steps=steps,
        parameters={name: entry for name, entry in plan.parameters.items() if name in used},
        takes=_crossing(plan, start),
        gives=_crossing(plan, stop),
    )


def _crossing(plan: Plan, cut: int) -> tuple[str, ...]:
    """What is computed before a step and read from it on, in the order in which it is computed."""
    if cut in (0, len(plan.steps)):
        return ()
    read = {*_names_read(plan.steps[cut:]), plan.result} - {*INPUTS} - plan.parameters.keys()
    computed = dict.fromkeys(name for step in plan.steps[:cut] for name in step.outputs)
    return tuple(name for name in computed if name in read)


def _names_read(steps: Sequence[Step]) -> Iterator[str]:
    for step in steps:
        yield from step.inputs
