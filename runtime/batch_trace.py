"""Where a batch shows: the first call of a compiled plan that gives a token other bits than alone."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler.execution.plan import BoundPlan
from ..custom_ops.linear.op import linear
from ..models.quantization.model_schemes import with_stored_weights
from .protocol.scheduler_output import NULL_BLOCK
from .startup.builder import kv_scales_of
from .startup.loaded import LoadedRuntime
from .startup.loader import select_attention
from .worker.attention import PagedAttention, allocate_caches
from .worker.input_batch import BatchView

CHUNK = 17  # tokens of a prompt in a step
MOST_TOKENS = 300  # of a prompt that is traced


class Part(NamedTuple):
    """Tokens of one sequence in a step: those from `first` to before `last`."""

    ids: Sequence[int]
    first: int
    last: int


def first_difference(loaded: LoadedRuntime, prompts: Sequence[Sequence[int]]) -> str | None:
    """The first call that gives tokens of a prompt other bits beside others, or in chunks, than alone.

    None where every call gives the same to all of these prompts, however they are cut: then it is something
    around the plan.
    """
    trace = _Trace(loaded)
    short = [prompt for prompt in prompts if len(prompt) <= MOST_TOKENS]
    for number, ids in enumerate(short):
        whole = Part(ids, 0, len(ids))
        alone = trace.run([[whole]])
        others = [Part(other, 0, len(other)) for other in short if other is not ids]
        chunks = [Part(ids, first, min(first + CHUNK, len(ids))) for first in range(0, len(ids), CHUNK)]
        for how, steps in (
            ("beside others", [[whole, *others[:6]]]),
            (f"in chunks of {CHUNK}", [[chunk] for chunk in chunks]),
            ("token by token", [[Part(ids, at, at + 1)] for at in range(len(ids))]),
        ):
            differs = _first(alone, trace.run(steps))
            if differs is not None:
                return f"{differs}, of prompt {number} {how}"
    return None


def _first(left: dict[str, Tensor], right: dict[str, Tensor]) -> str | None:
    return next((name for name, rows in left.items() if not _same_bits(rows, right[name])), None)


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


class _Trace:
    """Steps of the plan without a scheduler, which keep what each call gives the tokens of a sequence."""

    def __init__(self, loaded: LoadedRuntime) -> None:
        assert loaded.compiled is not None
        resolved = self._resolved = loaded.resolved
        tensors = loaded.weights.by_name | resolved.rope_tables()
        self._plan, self._weights = loaded.compiled.plan, resolved.joined(tensors)
        self._forward: BoundPlan = self._plan.bind(tensors, resolved.device)
        self._backend = select_attention(resolved)
        self._scales = kv_scales_of(resolved, loaded.weights.kv_scales)

    @torch.inference_mode()
    def run(self, steps: Sequence[Sequence[Part]]) -> dict[str, Tensor]:
        """By the names of the calls, in order, what they gave the tokens of the first part of every step."""
        attend, blocks = self._attention(steps)
        found: dict[str, list[Tensor]] = {}
        for parts in steps:
            for name, rows in self._step(parts, attend, blocks).items():
                found.setdefault(name, []).append(rows)
        return {name: torch.cat(rows) for name, rows in found.items()}

    def _attention(self, steps: Sequence[Sequence[Part]]) -> tuple[PagedAttention, int]:
        """Attention over a cache of its own, and how many blocks of it each sequence of a step has."""
        resolved = self._resolved
        longest = max(part.last for parts in steps for part in parts)
        blocks = -(-longest // resolved.block_size)
        caches = allocate_caches(
            num_layers=resolved.model.num_layers,
            num_blocks=1 + blocks * max(map(len, steps)),
            block_size=resolved.block_size,
            num_kv_heads=resolved.model.num_kv_heads,
            head_dim=resolved.model.head_dim,
            dtype=resolved.kv_cache_dtype,
            device=resolved.device,
        )
        specs, flag = resolved.definition.attention(resolved.model), resolved.config.batch_invariant
        return PagedAttention(self._backend, caches, specs, None, self._scales, flag), blocks

    def _step(self, parts: Sequence[Part], attend: PagedAttention, blocks: int) -> dict[str, Tensor]:
        view = self._view(parts, blocks)
        num_own, num_tokens = parts[0].last - parts[0].first, view.num_tokens
        found: dict[str, Tensor] = {}
        layer = -1

        def keep(name: str, values: Sequence[Any]) -> None:
            for number, value in enumerate(values):
                if isinstance(value, Tensor) and value.dim() and value.shape[0] == num_tokens:
                    found[f"{name}, result {number}"] = value[:num_own].clone()

        def attended(which: int, *tensors: Tensor) -> None:
            nonlocal layer
            layer = which
            attend(which, *tensors)
            keep(f"attention of layer {which}", tensors[3:4])

        def run_piece(call: Any, arguments: list[Any]) -> Any:
            results = call(arguments)
            keep(f"the piece behind layer {layer}'s attention" if layer >= 0 else "the first piece", results)
            return results

        attend.begin(view)
        hidden = self._forward(view.token_ids, view.positions, attended, run_piece)
        found["the LM head"] = self._logits(hidden)[:num_own].clone()
        return found

    def _logits(self, hidden: Tensor) -> Tensor:
        resolved, flag = self._resolved, self._resolved.config.batch_invariant
        ops = resolved.ops()._replace(linear=lambda x, weight, bias=None, /: linear(x, weight, bias, flag))
        logits: Tensor = resolved.definition.logits(
            resolved.model, self._weights, hidden, with_stored_weights(ops)
        )
        return logits

    def _view(self, parts: Sequence[Part], blocks: int) -> BatchView:
        device, size = self._resolved.device, self._resolved.block_size

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        ids = [token for part in parts for token in part.ids[part.first : part.last]]
        positions = [at for part in parts for at in range(part.first, part.last)]
        tables = 1 + NULL_BLOCK + torch.arange(len(parts) * blocks, device=device).view(len(parts), blocks)
        slots = [
            (1 + NULL_BLOCK + number * blocks) * size + at
            for number, part in enumerate(parts)
            for at in range(part.first, part.last)
        ]
        starts = [sum(part.last - part.first for part in parts[:number]) for number in range(len(parts) + 1)]
        nothing = ints([])
        return BatchView(
            num_tokens=len(ids),
            num_seqs=len(parts),
            num_samples=0,
            max_query_len=max(part.last - part.first for part in parts),
            token_ids=ints(ids),
            positions=ints(positions),
            slot_mappings=(ints(slots),),
            block_tables=(tables.to(torch.int32),),
            seq_lens=ints([part.last for part in parts]),
            query_start_loc=ints(starts),
            token_sources=nothing,
            logits_rows=nothing,
            sampled=nothing,
            temperature=nothing,
            top_k=nothing,
            top_p=nothing,
            min_p=nothing,
            seeds=nothing,
            sample_positions=nothing,
            banned=nothing,
        )
