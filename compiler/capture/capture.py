"""One TorchDynamo trace of a model, without its weights, for every number of tokens."""

import re
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx

from ...common.errors import CompileError
from ...custom_ops import attention_site
from ..numerics import MAX_NUM_TOKENS, TOKENS_HINT
from ..torch_internals import torch_compat, torch_trace
from ..torch_internals.torch_trace import GuardFact
from .covered import is_covered_file, is_covered_module
from .fingerprint import describe, source_line, symbols
from .functionalize import functionalize
from .readings import Covered, Readings, ask, require_answers, subject_of

Attend = Callable[..., None]  # (layer, query, key, value, out), and cos, sin where it is to rotate
Forward = Callable[..., Tensor]  # (weights, token_ids, positions, attend), and states where it takes them

# Values of a plan beside its weights begin with %, as those that pieces compute do; no weight may.
TOKEN_IDS, POSITIONS, NUM_TOKENS = "%:token_ids", "%:positions", "%:num_tokens"
STATES = "%:states"  # of programs that go on from another model's states, [T, columns]

AMBIENT, BOUND, READ, EMPTY = (
    "neutralized around every trace and every call",
    "checked again when weights bind",
    "read again at every start",
    "empty, as asserted after code generation",
)
# What a later start asks of the subject of each kind of guard; {0} is the subject, names are the guard's own.
QUESTIONS = {
    "value({0})": {
        *("BOOL_MATCH", "BUILTIN_MATCH", "CLASS_MATCH", "CLOSURE_MATCH", "CONSTANT_MATCH"),
        *("CONSTANT_SUBCLASS_MATCH", "EQUALS_MATCH", "FUNCTION_MATCH", "ID_MATCH", "MODULE_MATCH"),
        *("NONE_MATCH", "NOT_NONE_MATCH", "RANGE_ITERATOR_MATCH"),
    },
    "type({0})": {"TYPE_MATCH"},
    "length({0})": {"SEQUENCE_LENGTH", "TUPLE_ITERATOR_LEN"},
    "keys({0})": {"DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK"},
    "contains({0}, {key!r})": {"DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS"},
    "has({0}, {attr!r})": {"HASATTR"},
    "own({0}, {attr!r})": {"NOT_PRESENT_IN_GENERIC_DICT"},
    "same({0}, {source_b})": {"DUPLICATE_INPUT"},
}
# What becomes of the others. A kind that is not listed fails the capture.
DISPOSITIONS = {
    BOUND: {"TENSOR_MATCH"},
    AMBIENT: {
        "AUTOGRAD_SAVED_TENSORS_HOOKS",
        "DEFAULT_DEVICE",
        "DETERMINISTIC_ALGORITHMS",
        "FSDP_TRAINING_STATE",
        "GLOBAL_STATE",
        "GRAD_MODE",
        "TORCH_FUNCTION_STATE",
    },
    EMPTY: {"SHAPE_ENV"},
    READ: set().union(*QUESTIONS.values()),
}
REFUSED = (
    "a guard of a kind that no question stands for, such as one on a stream or an iterator",
    "what has no name that a later start could follow",
    "a function that is called by a name which is not in its code",
    "a function that is kept out of the trace, or whose result is taken as a constant",
    "a function whose globals are not those of its module",
    "a tensor that is neither a weight nor an input",
    "of a pass of one's own: a closed-over or bound object that no text can hold, such as a file or a lock",
)
INPUTS = (
    "weights",
    "token_ids",
    "positions",
    "states",
    "attend",
)  # of _trace; bind() stands for their guards
# Whose globals the version of torch, or the hash of our sources, stands for.
OWN_MODULES = (*torch_trace.COMPILERS, __name__, torch_trace.__name__)


CHECKED_BY_PLAN = re.compile(
    rf"True|u\d+ (>= 0|>= 1|> 0|<= {MAX_NUM_TOKENS})|Ne\(u\d+, 0\)|Eq\(u\d+, u\d+\)|0 < u\d+"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """One assumption of the trace and why it cannot break silently."""

    kind: str
    subject: str
    disposition: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """The whole model as one torch-level FX graph; `inputs` names what each placeholder stands for."""

    graph: fx.GraphModule
    inputs: Mapping[str, str]  # placeholder name -> weight name, token_ids, positions or num_tokens
    guards: tuple[Guard, ...]
    readings: Readings
    seconds: float


def capture(
    forward: Forward,
    weights: Mapping[str, Tensor],
    device: torch.device,
    states: tuple[int, torch.dtype] | None = None,
) -> Captured:
    """The graph of forward(weights, token_ids, positions, attend) for 1 to MAX_NUM_TOKENS tokens.

    weights may be fake tensors. states: columns and dtype of what the forward takes as a fifth argument, a
    row a token; None where it takes none. Raises CompileError where the trace breaks, where a guard is of a
    kind that nothing covers, or where the token dimension was specialised.
    """
    started = time.perf_counter()
    found: dict[str, Any] = {}

    def on_guards(facts: list[GuardFact], scope: Mapping[str, Any], codes: list[types.CodeType]) -> None:
        found["guards"] = tuple(_classify(fact) for fact in facts)
        found["readings"] = _readings(facts, scope, forward, codes)

    for name in weights:
        if name.startswith("%"):
            raise CompileError(f"a weight is named {name!r}; wanted a name that does not begin with %")
    token_ids, positions = (torch.zeros(7, dtype=torch.int32, device=device) for _ in range(2))
    inputs_of = {TOKEN_IDS: token_ids, POSITIONS: positions}
    if states is not None:
        inputs_of[STATES] = torch.zeros(7, states[0], dtype=states[1], device=device)
    arguments = (forward, dict(weights), _mark_attention, *inputs_of.values())
    traced = torch_trace.trace_once(
        cast(types.FunctionType, _trace), arguments, len(inputs_of), TOKENS_HINT, on_guards
    )
    names = {id(tensor): name for name, tensor in weights.items()}
    names |= {id(tensor): name for name, tensor in inputs_of.items()}
    inputs = {node.name: _input_name(node, value, names) for node, value in traced.inputs}
    drop_size_assertions(traced.graph)
    functionalize(traced.graph.graph)
    _require_one_size(traced.graph, inputs)
    _require_known_targets(traced.graph)
    return Captured(graph=traced.graph, inputs=inputs, seconds=time.perf_counter() - started, **found)


def _trace(
    forward: Forward,
    weights: Mapping[str, Tensor],
    attend: Attend,
    token_ids: Tensor,
    positions: Tensor,
    *states: Tensor,
) -> Tensor:
    torch_trace.bound_tokens(token_ids, MAX_NUM_TOKENS)
    for one in states:
        torch_trace.match_tokens(one, token_ids)
    return forward(weights, token_ids, positions, attend, *states)


def _readings(
    facts: list[GuardFact], scope: Mapping[str, Any], forward: Forward, codes: list[types.CodeType]
) -> Readings:
    """Each reading of the trace with its answer; CompileError for one that no later start could repeat."""
    covered: set[types.CodeType] = set()
    asked = [question for fact in facts if (question := _question(fact, scope, forward)) is not None]
    answers = ask(set(asked), forward, covered)
    require_answers(answers)
    for code in codes:
        if code not in covered and not is_covered_file(code.co_filename):
            raise CompileError(
                f"the model calls {code.co_qualname} of {Path(code.co_filename).name} by a name that is not "
                f"in its code, so that no cache key could hold it; call it by its name"
            )
    return answers


def _question(fact: GuardFact, scope: Mapping[str, Any], forward: Forward) -> str | None:
    """The reading that stands for a guard at a later start; None where a cache key covers it already."""
    form = next((form for form, kinds in QUESTIONS.items() if fact.kind in kinds), None)
    root = re.match(r"\w+", fact.subject.removeprefix("L['"))
    if form is None or (root and root[0] in INPUTS):
        return None
    try:
        subject, arguments = subject_of(fact.subject, scope, forward), dict(fact.arguments)
        if "source_b" in arguments:
            arguments["source_b"] = subject_of(arguments["source_b"], scope, forward)
        return None if _is_own(subject) else form.format(subject, **arguments)
    except Covered:
        return None
    except (ValueError, KeyError, SyntaxError) as error:
        raise CompileError(
            f"the model depends on {fact.kind} of {fact.subject} ({fact.text}), which cannot be read again "
            f"at a later start: {error}"
        ) from None


def _is_own(subject: str) -> bool:
    return any(re.search(rf"module\('{name}[.']", subject) for name in OWN_MODULES)


def _require_known_targets(module: fx.GraphModule) -> None:
    """Refuse a function that the trace did not look into: no cache key would change with it."""
    for node in module.graph.nodes:
        is_op = node.op != "call_function" or isinstance(node.target, torch_compat.OPS)
        if not is_op and not _is_known(getattr(node.target, "__module__", None)):
            name = torch_compat.qualified_name(node.target)
            raise CompileError(
                f"the model calls {name}, which was kept out of the trace; call what can be traced, or "
                f"an op of torch.library{source_line(node)}"
            )


def _is_known(module: str | None) -> bool:
    return module is None or is_covered_module(module) or module in ("_operator", "math")


def _mark_attention(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    attention_site(q, k, v, out, layer)


def _input_name(node: fx.Node, value: object, names: Mapping[int, str]) -> str:
    if torch_compat.is_scalar(value):
        size = str(node.meta["example_value"])
        if size.isdecimal():
            raise CompileError(
                f"a line of the model's forward works for exactly {size} tokens; wanted any number"
            )
        return NUM_TOKENS
    name = names.get(id(value))
    if name is None:
        raise CompileError(
            f"capture found a tensor that is neither a weight nor an input: {node.name} "
            f"({node.meta.get('example_value')}); a model's forward must take every tensor from its weights"
        )
    return name


def _classify(fact: GuardFact) -> Guard:
    for disposition, kinds in DISPOSITIONS.items():
        if fact.kind in kinds:
            return Guard(kind=fact.kind, subject=fact.subject, disposition=disposition)
    raise CompileError(
        f"capture met a guard that nothing covers: "
        f"{fact.kind} on {fact.subject or 'the process'}: {fact.text}"
    )


def drop_size_assertions(module: fx.GraphModule) -> None:
    """Remove the asserts on the token dimension: the plan checks its inputs itself, once a call.

    Raises CompileError for one that the plan does not check, since the model would be run where it is wrong.
    """
    graph = module.graph
    for node in reversed(list(graph.nodes)):
        is_assertion = node.op == "call_function" and torch_compat.is_size_assertion(node.target)
        if is_assertion and not CHECKED_BY_PLAN.fullmatch(_condition(node)):
            raise CompileError(
                f"the model runs only for numbers of tokens with {_condition(node)}; "
                f"wanted 1 to {MAX_NUM_TOKENS}{source_line(node)}"
            )
        is_scalar = torch_compat.is_scalar(node.meta.get("example_value"))
        if is_assertion or (node.op in ("call_function", "call_method") and is_scalar and not node.users):
            graph.erase_node(node)
    module.recompile()


def _condition(assertion: fx.Node) -> str:
    """The condition of an assertion as a symbolic expression of its sizes."""
    asserted = assertion.args[0]
    return str(asserted.meta.get("example_value") if isinstance(asserted, fx.Node) else asserted)


def _require_one_size(module: fx.GraphModule, inputs: Mapping[str, str]) -> None:
    """Refuse a size or number that depends on the values of tensors; only the number of tokens may vary."""
    known = {
        symbol for node in module.graph.find_nodes(op="placeholder") for symbol in symbols(describe(node))
    }
    for node in module.graph.nodes:
        if node.name not in inputs and symbols(describe(node)) - known:
            raise CompileError(
                f"{node.name}{describe(node)} depends on the values of tensors; wanted the same computation "
                f"for all values{source_line(node)}"
            )
