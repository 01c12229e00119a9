"""A compiled model as straight-line calls: pieces, with attend between them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...common.errors import CompileError, ShapeError
from ..capture.capture import NUM_TOKENS, POSITIONS, STATES, TOKEN_IDS, Attend
from ..capture.readings import Readings
from ..capture.split import AttentionCall, SplitModel
from ..codegen.inductor import Piece
from ..numerics import MAX_NUM_TOKENS
from ..passes.gemms import Gemm
from .message import MessageLayout, TokenValue

ParameterTable = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
PieceCall = Callable[[list[Any]], Sequence[Any]]
RunPiece = Callable[[PieceCall, list[Any]], Sequence[Any]]
ALIGNMENT = 16  # bytes; generated kernels of some torch versions load vectors without checking
INPUTS = (TOKEN_IDS, POSITIONS, NUM_TOKENS, STATES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One call of a plan by the names of its values: a piece, or attend of a layer (piece None)."""

    piece: int | None
    layer: int | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Steps over named values, the unique pieces they call, and the weights they need.

    A stage of a plan has some of its steps: it takes values that the stage before has computed, and all but
    the last give values to the next in place of the result.
    """

    steps: tuple[Step, ...]
    pieces: tuple[Piece, ...]
    parameters: ParameterTable
    result: str
    reports: tuple[Mapping[str, Any], ...] = ()  # of the passes over the whole model
    values: Mapping[str, TokenValue] = field(default_factory=dict)  # of what pieces compute, those with rows
    takes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """The GEMMs that its pieces leave to ops of ours, each once."""
        return tuple(dict.fromkeys(gemm for piece in self.pieces for gemm in piece.artifact.gemms))

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose attention it calls, in order."""
        return tuple(step.layer for step in self.steps if step.layer is not None)

    def bind(
        self, weights: Mapping[str, Tensor], device: torch.device, received: Tensor | None = None
    ) -> "BoundPlan":
        """The plan on real weights; ShapeError where one is not what the capture assumed.

        received: of a stage that takes values, where the message with them lies at every call.
        """
        for name, (shape, dtype) in self.parameters.items():
            _check_weight(name, weights.get(name), shape, dtype, device)
        return BoundPlan(self, weights, received)

    def layout(self, names: Sequence[str]) -> MessageLayout:
        """How these values lie in a message. CompileError for what is no contiguous tensor with rows."""
        for name in names:
            if name not in self.values:
                raise CompileError(
                    f"{name} goes from one stage to the next and is no contiguous tensor with a row a token; "
                    "wanted pipeline_parallel 1 for this model"
                )
        return MessageLayout(tuple(self.values[name] for name in names))


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A plan and how it came about."""

    plan: Plan
    guards: tuple[Mapping[str, str], ...]
    readings: Readings  # of the program's surroundings, on which the plan depends
    num_compiled: int
    num_loaded: int
    seconds: Mapping[str, float]  # of the stages that ran: capture, compile or load
    miss: str | None

    @property
    def num_pieces(self) -> int:
        return sum(step.piece is not None for step in self.plan.steps)


def _check_weight(
    name: str, weight: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """What the trace took for granted of a weight."""
    if weight is None:
        raise ShapeError(f"weight {name} is missing; the plan wants {list(shape)} {dtype}")
    if tuple(weight.shape) != shape or weight.dtype != dtype or weight.device.type != device.type:
        got = f"{list(weight.shape)} {weight.dtype} on {weight.device}"
        raise ShapeError(f"weight {name} is {got}; the plan wants {list(shape)} {dtype} on {device.type}")
    if not weight.is_contiguous() or weight.data_ptr() % ALIGNMENT:
        raise ShapeError(f"weight {name} must be contiguous and aligned to {ALIGNMENT} bytes")


def steps_of(model: SplitModel, piece_of: Sequence[int]) -> tuple[Step, ...]:
    """The calls of a split model, each piece replaced by the number of the unique piece it equals."""
    numbers = iter(piece_of)
    steps = []
    for call in model.calls:
        if isinstance(call, AttentionCall):
            steps.append(Step(piece=None, layer=call.layer, inputs=call.tensors, outputs=()))
        else:
            steps.append(Step(piece=next(numbers), layer=None, inputs=call.inputs, outputs=call.outputs))
    return tuple(steps)


def values_of(model: SplitModel) -> dict[str, TokenValue]:
    """What the pieces of a split model give, where it has a row for each token."""
    given = {name for piece in model.pieces for name in piece.outputs}
    return {name: TokenValue(*row) for name, row in model.rows.items() if name in given}


@dataclass(frozen=True, kw_only=True, slots=True)
class _SlotStep:
    """A step with its values as places in a list; `done` are those that nobody reads afterwards."""

    call: PieceCall | None
    layer: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    done: tuple[int, ...]


class BoundPlan:
    """forward(token_ids, positions, attend) -> hidden states, on the weights it was bound to.

    A stage but the last returns a message, uint8 [bytes], which begins anew at every call.
    """

    def __init__(self, plan: Plan, weights: Mapping[str, Tensor], received: Tensor | None = None) -> None:
        results = plan.gives or (plan.result,)
        names = [*INPUTS, *plan.takes, *results]
        names += [name for step in plan.steps for name in (*step.inputs, *step.outputs)]
        slots = {name: slot for slot, name in enumerate(dict.fromkeys(names))}
        self._values: list[Any] = [weights.get(name) for name in slots]
        self._results = [slots[name] for name in results]
        self._steps = _slot_steps(plan, slots, kept={*self._results})
        self._taken, self._received = plan.layout(plan.takes), received
        self._given = plan.layout(plan.gives) if plan.gives else None
        self._with_rows = _inputs_with_rows(plan, weights)

    @property
    def can_take_rows(self) -> bool:
        """Whether the last piece computes a result, from a row a token alone: of any tokens, then."""
        return self._with_rows is not None

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        run_piece: RunPiece | None = None,
        *,
        states: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, H] of T tokens [T] int32 at positions [T] int32.

        run_piece(call, arguments) is used for each piece in place of calling it, to capture it.
        states: [T, columns], contiguous, of programs that take them. rows [R] int32: the tokens whose hidden
        states [R, H] are wanted, of a plan that can take them; all others' end with the last attention.
        """
        num_tokens = token_ids.shape[0]
        if token_ids.shape != positions.shape or not 0 < num_tokens <= MAX_NUM_TOKENS:
            got = f"{list(token_ids.shape)} token ids, {list(positions.shape)} positions"
            raise ShapeError(f"got {got}; wanted equally many, 1 to {MAX_NUM_TOKENS}")
        if states is not None and (states.shape[0] != num_tokens or not states.is_contiguous()):
            got = f"states {list(states.shape)} with strides {states.stride()} of {num_tokens} tokens"
            raise ShapeError(f"got {got}; wanted a row a token, one behind the other")
        values = self._values.copy()
        values[:4] = token_ids, positions, num_tokens, states
        if self._received is not None:
            taken = self._taken.views(self._received, num_tokens)
            values[4 : 4 + len(taken)] = taken
        steps = self._steps if rows is None else self._steps[:-1]
        for step in steps:
            _advance(step, values, attend, run_piece)
        if rows is not None:
            return self.call_last([values[slot] for slot in self._steps[-1].inputs], rows)
        results: list[Any] = [values[slot] for slot in self._results]
        if self._given is not None:  # to be captured as pieces are
            results = [*run_piece(self._pack, results)] if run_piece else [*self._pack(results)]
        result: Tensor = results[0]
        return result

    def call_last(self, arguments: Sequence[Any], rows: Tensor) -> Tensor:
        """Hidden states [R, H] of these tokens [R] int32, from what the last piece takes of all tokens."""
        call = self._steps[-1].call
        assert call is not None, "a plan that ends with attention"
        assert self._with_rows is not None, "a plan that takes no rows"
        found = call([_of_rows(*each, rows) for each in zip(arguments, self._with_rows, strict=True)])
        result: Tensor = found[0]
        return result

    def _pack(self, values: list[Any]) -> tuple[Tensor]:
        """The values that a stage gives, as one message."""
        assert self._given is not None, "nothing is given"
        return (self._given.packed(values, self._received),)


def _inputs_with_rows(plan: Plan, weights: Mapping[str, Tensor]) -> tuple[bool, ...] | None:
    """Which inputs of the last piece have a row a token, for one that gives the result of those alone.

    Pieces do not mix tokens: those of a step are of any requests. None where the last step is another, or
    where an input is nothing of what is known to have rows or to have none.
    """
    last = plan.steps[-1]
    with_rows = {TOKEN_IDS, POSITIONS, STATES, *plan.values}
    known = all(name in with_rows or name == NUM_TOKENS or name in weights for name in last.inputs)
    if plan.gives or last.piece is None or last.outputs != (plan.result,) or not known:
        return None
    return tuple(name in with_rows for name in last.inputs)


def _of_rows(value: Any, has_rows: bool, rows: Tensor) -> Any:
    """An input of the last piece, for these tokens."""
    if isinstance(value, int):
        return len(rows)
    return value.index_select(0, rows) if has_rows and value is not None else value


def _advance(step: _SlotStep, values: list[Any], attend: Attend, run_piece: RunPiece | None) -> None:
    """One step; what it reads for the last time is let go first, so that a piece frees it while it runs."""
    arguments = [values[slot] for slot in step.inputs]
    for slot in step.done:
        values[slot] = None
    if step.call is None:
        attend(step.layer, *arguments)
        return
    results = run_piece(step.call, arguments) if run_piece else step.call(arguments)
    for slot, value in zip(step.outputs, results, strict=True):
        values[slot] = value


def _slot_steps(plan: Plan, slots: Mapping[str, int], kept: set[int]) -> tuple[_SlotStep, ...]:
    """Walked backwards, so that the first step met that reads a value is the last to do so."""
    kept = kept | {slots[name] for name in plan.parameters if name in slots}
    steps: list[_SlotStep] = []
    for step in reversed(plan.steps):
        inputs = tuple(slots[name] for name in step.inputs)
        outputs = tuple(slots[name] for name in step.outputs)
        done = tuple(slot for slot in dict.fromkeys(inputs + outputs) if slot not in kept)
        kept |= set(done)
        call = None if step.piece is None else plan.pieces[step.piece].call
        layer = -1 if step.layer is None else step.layer
        steps.append(_SlotStep(call=call, layer=layer, inputs=inputs, outputs=outputs, done=done))
    if any(step.call is None and step.outputs for step in steps):
        raise CompileError("an attention step with outputs of its own")
    return tuple(reversed(steps))
