"""One TorchDynamo trace of a model, without its weights, for every number of tokens."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ..common.errors import CompileError
from ..custom_ops import attention_site
from . import torch_compat
from .config import MAX_NUM_TOKENS, TOKENS_HINT
from .fingerprint import describe, source_line, symbols
from .straighten import functionalize

Attend = Callable[..., None]  # (layer, query, key, value, out), and cos, sin where it is to rotate
Forward = Callable[[Mapping[str, Tensor], Tensor, Tensor, Attend], Tensor]

# Values of a plan beside its weights begin with %, as those that pieces compute do; no weight may.
TOKEN_IDS, POSITIONS, NUM_TOKENS = "%:token_ids", "%:positions", "%:num_tokens"

# What becomes of each kind of guard Dynamo writes. A kind that is not listed fails the capture.
DISPOSITIONS = {
    "checked again when weights bind": {"TENSOR_MATCH"},
    "covered by the hash of the traced sources": {
        "BUILTIN_MATCH",
        "CLASS_MATCH",
        "CLOSURE_MATCH",
        "FUNCTION_MATCH",
        "MODULE_MATCH",
    },
    "covered by the plan key": {
        "BOOL_MATCH",
        "CONSTANT_MATCH",
        "DICT_CONTAINS",
        "DICT_KEYS_MATCH",
        "DICT_NOT_CONTAINS",
        "EQUALS_MATCH",
        "HASATTR",
        "ID_MATCH",
        "MAPPING_KEYS_CHECK",
        "NONE_MATCH",
        "NOT_PRESENT_IN_GENERIC_DICT",
        "SEQUENCE_LENGTH",
        "TUPLE_ITERATOR_LEN",
        "TYPE_MATCH",
    },
    "set by the runtime around every call": {
        "AUTOGRAD_SAVED_TENSORS_HOOKS",
        "DEFAULT_DEVICE",
        "DETERMINISTIC_ALGORITHMS",
        "FSDP_TRAINING_STATE",
        "GLOBAL_STATE",
        "GRAD_MODE",
        "TORCH_FUNCTION_STATE",
    },
    "empty, as asserted after code generation": {"SHAPE_ENV"},
    "true of any inputs that bind": {"DUPLICATE_INPUT"},
}


CHECKED_BY_PLAN = re.compile(rf"True|u\d+ (>= 0|>= 1|> 0|<= {MAX_NUM_TOKENS})|Ne\(u\d+, 0\)|0 < u\d+")


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
    seconds: float


def capture(forward: Forward, weights: Mapping[str, Tensor], device: torch.device) -> Captured:
    """The graph of forward(weights, token_ids, positions, attend) for 1 to MAX_NUM_TOKENS tokens.

    weights may be fake tensors. Raises CompileError where the trace breaks, where a guard is of a kind that
    nothing covers, or where the token dimension was specialised.
    """
    started = time.perf_counter()

    def trace(weights: Mapping[str, Tensor], token_ids: Tensor, positions: Tensor) -> Tensor:
        torch_compat.bound_tokens(token_ids, MAX_NUM_TOKENS)
        return forward(weights, token_ids, positions, _mark_attention)

    for name in weights:
        if name.startswith("%"):
            raise CompileError(f"a weight is named {name!r}; wanted a name that does not begin with %")
    token_ids, positions = (torch.zeros(7, dtype=torch.int32, device=device) for _ in range(2))
    traced = torch_compat.trace_once(trace, dict(weights), token_ids, positions, TOKENS_HINT)
    names = {id(tensor): name for name, tensor in weights.items()}
    names |= {id(token_ids): TOKEN_IDS, id(positions): POSITIONS}
    inputs = {node.name: _input_name(node, value, names) for node, value in traced.inputs}
    drop_size_assertions(traced.graph)
    functionalize(traced.graph.graph)
    _require_one_size(traced.graph, inputs)
    return Captured(
        graph=traced.graph,
        inputs=inputs,
        guards=tuple(_classify(kind, subject, text) for kind, subject, text in traced.guards),
        seconds=time.perf_counter() - started,
    )


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


def _classify(kind: str, subject: str, text: str) -> Guard:
    for disposition, kinds in DISPOSITIONS.items():
        if kind in kinds:
            return Guard(kind=kind, subject=subject, disposition=disposition)
    raise CompileError(
        f"capture met a guard that nothing covers: {kind} on {subject or 'the process'}: {text}"
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
    """What an assertion asserts, by the symbols of its sizes."""
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
