"""Passes broken on purpose: how a fault is put into one, and whether a check catches it."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import Phase, find, settings
from hypothesis.errors import NoSuchExample
from torch import fx

from lamina.compiler.passes import pipeline
from lamina.compiler.passes.add_rms_norm import ADD_RMS_NORM, RMS_NORM
from lamina.compiler.passes.canonicalise import CANONICALISE
from lamina.compiler.passes.graph import Pass, PassReport
from lamina.compiler.passes.silu_and_mul import GELU_AND_MUL, SILU_AND_MUL
from lamina.testing import Traced, checks, programs, trace

from .pipelines import GATE_QUANTIZED, LINEAR, NORM_QUANTIZED
from .tally import PROVED

Check = Callable[[Pass, Traced], None]
# What a pass joins must have its names.
JOINED = {
    "add_rms_norm_linear": (ADD_RMS_NORM, SILU_AND_MUL, LINEAR),
    "qk_norm": (RMS_NORM,),
    "rms_norm_quantized": (ADD_RMS_NORM, RMS_NORM),
    "act_and_mul_quantized": (SILU_AND_MUL, GELU_AND_MUL),
    "mlp_w8a8": (ADD_RMS_NORM, RMS_NORM, SILU_AND_MUL, GELU_AND_MUL, NORM_QUANTIZED, GATE_QUANTIZED),
    "gated_w4a16": (SILU_AND_MUL, GELU_AND_MUL),
    "linear_silu_and_mul": (SILU_AND_MUL, GELU_AND_MUL, LINEAR),
}


def before(step: Pass, traced: Traced) -> fx.Graph:
    """A program's graph as a pass meets it."""
    if step.name == CANONICALISE.name:
        return traced.graph
    return pipeline.rewrite(traced.graph, (CANONICALISE, *JOINED.get(step.name, ()))).graph


def values(step: Pass, traced: Traced) -> None:
    """The result has the program's bits."""
    checks.check_values(traced, step.run(before(step, traced))[0])


def memory(step: Pass, traced: Traced) -> None:
    """The result's outputs lie as the program's."""
    checks.check_memory(traced, step.run(before(step, traced))[0])


def form(step: Pass, traced: Traced) -> None:
    """The result is a sound graph, and the given one as it was."""
    graph = before(step, traced)
    checks.check_well_formed(traced, graph, checks.apply(step, graph)[0])


def census(step: Pass, traced: Traced) -> None:
    """As many sites are found as were planted."""
    assert step.run(before(step, traced))[1].num_matches == traced.sites[step.name]


def is_caught(step: Pass, check: Check, kinds: tuple[str, ...], max_examples: int = 60) -> bool:
    """Whether some program makes the check fail; a pass that breaks down has failed too."""

    def fails(program: Any) -> bool:
        try:
            check(step, trace(program))
        except Exception:
            return True
        return False

    once = settings(max_examples=max_examples, database=None, deadline=None, phases=[Phase.generate])
    try:
        find(programs(kinds), fails, settings=once, random=random.Random(0))
    except NoSuchExample:
        return False
    return True


def assert_caught(step: Pass, check: Check, kinds: tuple[str, ...]) -> None:
    """A fault that was put in is found, and counted."""
    PROVED["faults"] += 1
    assert is_caught(step, check, kinds)
    PROVED["caught"] += 1


def with_op(step: Pass, op: Any, wrong: Callable[..., Any]) -> Pass:
    """The pass with an op that it puts in replaced by a wrong formula."""

    def run(graph: fx.Graph) -> tuple[fx.Graph, PassReport]:
        graph, report = step.run(graph)
        for node in graph.find_nodes(op="call_function", target=op):
            node.target = wrong
        return graph, report

    return replace(step, run=run)


def forgetting(obstacle: Callable[..., str | None], reason: str) -> Callable[..., str | None]:
    """A pass's test of a site, deaf to one reason."""

    def forgetful(*site: fx.Node) -> str | None:
        found = obstacle(*site)
        return None if found and reason in found else found

    return forgetful
