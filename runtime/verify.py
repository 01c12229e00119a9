"""A model compiled, run op by op, and run by transformers: where they differ, and which pass is to blame."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..common.errors import ConfigError, LogitsError, RequestError
from ..common.logging import get_logger
from ..common.progress import Progress
from ..compiler.capture.split import PieceCall, SplitModel
from ..compiler.codegen.inductor import compile_piece
from ..compiler.compile import passes_of, split_program
from ..compiler.execution.plan import Compiled
from ..compiler.inspect import verify as pieces
from ..compiler.inspect.verify import Culprit, Error, PieceCheck, error_of
from ..compiler.passes.graph import Pass
from ..custom_ops.paged_attention.reference import dense_attention
from ..custom_ops.rotary_embedding.reference import rotary_embedding
from ..custom_ops.sample.reference import are_broken
from ..models.quantization.kept import KeptProjection
from .config import RuntimeConfig
from .reference_run import Observed, by_transformers
from .startup.loader import compile_only, read_weights, resolve_runtime
from .startup.resolved import ResolvedRuntime
from .tokenization.tokenizer import load_tokenizer

logger = get_logger("runtime")
PROMPTS = (
    "The capital of France is Paris, and the capital of",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "1 + 1 = 2, 2 + 2 = 4, 4 + 4 = 8, 8 + 8 =",
)
SLACK = 2.0  # of errors that have come through layers, and differ by chance more than those of a piece
NUM_RANDOM_IDS = 24  # of a prompt for a model without a tokenizer
Forward = Callable[[Tensor, Tensor, Any], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerErrors:
    """How far query, key and value of a layer (-1: the logits) are off, the worst of the three."""

    layer: int
    compiled_to_eager: Error
    compiled: Error | None  # to transformers in a wider dtype, as the next
    eager: Error | None
    is_right: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A position after which the likeliest token is not the same; margin: of the reference's best logit."""

    prompt: int
    position: int
    compiled: int
    eager: int
    transformers: int | None
    margin: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What `lamina verify` found."""

    prompts: tuple[tuple[int, ...], ...]
    layers: tuple[LayerErrors, ...]  # the worst of all prompts
    differences: tuple[Difference, ...]
    pieces: tuple[PieceCheck, ...]  # each in its place, on what the pieces before it computed op by op
    first_wrong: int | None  # of the pieces
    culprit: Culprit | None
    reference: str  # transformers, or why not
    quantization: tuple[str, ...]  # how projections are kept, in sentences; the reference has what they mean
    projections: dict[str, KeptProjection]  # those that are kept otherwise

    @property
    def is_right(self) -> bool:
        """Whether rounding explains everything."""
        return self.culprit is None and all(layer.is_right for layer in self.layers)


def verify(
    config: RuntimeConfig, prompts: Sequence[str | Sequence[int]], max_tokens: int, progress: Progress
) -> Verified:
    """Compare the three on prompts, each continued by max_tokens of the likeliest tokens.

    No prompts: a few of our own. Raises ConfigError where nothing is compiled, RequestError for a text
    without a tokenizer, LogitsError that names the first layer where values are not finite, and what loading
    and compiling raise.
    """
    if config.compile_config is None:
        raise ConfigError("compile is False; wanted True or a CompileConfig, to have anything to verify")
    config.parallel.require_one_rank("verify compares what one process computes")
    resolved = resolve_runtime(replace(config, speculative=None), progress)  # which changes no answer
    loaded = read_weights(resolved, progress)
    weights = loaded.by_name | resolved.rope_tables()
    subject = _Subject(resolved, weights)
    prompts = token_ids_of(resolved, prompts)
    for prompt in prompts:
        _check_finite(subject, subject.observe(subject.eager, prompt))
    compiled = compile_only(resolved, progress)
    ids = [subject.continued(prompt, max_tokens) for prompt in prompts]
    eager = [subject.observe(subject.eager, prompt) for prompt in ids]
    bound = compiled.plan.bind(weights, resolved.device)
    ours = [subject.observe(bound, prompt) for prompt in ids]
    progress("verify", 0.3, "transformers")
    theirs, reference = by_transformers(resolved, weights, ids)
    progress("verify", 0.6, "pieces")
    checks, first_wrong, culprit = _check_pieces(subject, compiled, ids[0])
    return Verified(
        prompts=tuple(map(tuple, ids)),
        layers=_layers(ours, eager, theirs, resolved.dtype),
        differences=tuple(_differences(ours, eager, theirs)),
        pieces=checks,
        first_wrong=first_wrong,
        culprit=culprit,
        reference=reference,
        quantization=loaded.sentences(),
        projections=loaded.kept(),
    )


@dataclass(frozen=True, slots=True)
class _Subject:
    """The model under test with all it takes to run it op by op."""

    resolved: ResolvedRuntime
    weights: dict[str, Tensor]

    def eager(self, token_ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
        return self.resolved.program().forward(self.weights, token_ids, positions, attend)

    @torch.inference_mode()
    def observe(self, forward: Forward, ids: Sequence[int]) -> Observed:
        """A run of one sequence with attention by its formula."""
        observed = Observed()
        hidden = forward(*self.inputs(ids), self.attention(observed))
        resolved = self.resolved
        weights = resolved.joined(self.weights)
        observed.logits = resolved.definition.logits(resolved.model, weights, hidden, resolved.ops()).float()
        return observed

    def inputs(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        device = self.resolved.device
        token_ids = torch.tensor(list(ids), dtype=torch.int32, device=device)
        return token_ids, torch.arange(len(ids), dtype=torch.int32, device=device)

    def attention(self, observed: Observed) -> Callable[..., None]:
        specs = self.resolved.definition.attention(self.resolved.model)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *angles: Tensor) -> None:
            if angles:
                q, k = rotary_embedding(q, k, *angles)
            spec = specs[layer]
            limits = {"window": spec.window or -1, "chunk": spec.chunk or -1}
            out.copy_(dense_attention(q, k, v, spec.scale, **limits, soft_cap=spec.soft_cap or 0.0))
            observed.layers.append((q.clone(), k.clone(), v.clone()))

        return attend

    def continued(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        """The prompt and what the model, run op by op, finds likeliest after it."""
        out = list(ids)
        for _ in range(max_tokens):
            out.append(int(self.observe(self.eager, out).logits[-1].argmax()))
        return out


def token_ids_of(resolved: ResolvedRuntime, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
    """Token ids of prompts; of a few of our own where there are none. RequestError for what is no prompt."""
    tokenizer = load_tokenizer(resolved.folder, override=resolved.config.tokenizer)
    if tokenizer is None and not prompts:
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(resolved.model.vocab_size, (NUM_RANDOM_IDS,), generator=generator).tolist()]
    ids = []
    for prompt in prompts or PROMPTS:
        if isinstance(prompt, str):
            if tokenizer is None:
                raise RequestError("a text prompt needs a tokenizer, and the model's folder has none")
            prompt = tokenizer.encode(prompt)
        if not prompt:
            raise RequestError("a prompt is empty; wanted at least one token")
        ids.append(list(prompt))
    return ids


def _check_finite(subject: _Subject, observed: Observed) -> None:
    """LogitsError where a run op by op meets NaN or infinity: no comparison says anything then."""
    layers = (all(bool(part.isfinite().all()) for part in parts) for parts in observed.layers)
    broken = next((number for number, is_finite in enumerate(layers) if not is_finite), None)
    where = "" if broken is None else f"queries, keys or values of layer {broken}"
    if broken is None and bool(are_broken(observed.logits).any()):
        where = "the logits"
    if where:
        weights = [name for name, weight in subject.weights.items() if not _is_finite(weight)]
        why = f"no weight is, so a GEMM is beyond {subject.resolved.dtype}; try a wider dtype="
        if weights:
            why = f"so is the weight {', '.join(weights[:3])}: the checkpoint is damaged"
        raise LogitsError(f"{where} are the first values that are not finite (NaN or infinity), and {why}")


def _is_finite(weight: Tensor) -> bool:
    narrow = weight.is_floating_point() and weight.itemsize == 1  # float8, of which torch asks nothing
    return bool((weight.float() if narrow else weight).isfinite().all())


def _check_pieces(
    subject: _Subject, compiled: Compiled, ids: Sequence[int]
) -> tuple[tuple[PieceCheck, ...], int | None, Culprit | None]:
    """Every piece on what those before it computed op by op, up to the first that is wrong."""
    resolved, plan = subject.resolved, compiled.plan
    config = resolved.config.compile_config
    assert config is not None
    passes = passes_of(config, resolved.config.numerics)
    model = split_program(resolved.program(), passes)
    calls = [plan.pieces[step.piece] for step in plan.steps if step.piece is not None]
    checks: list[PieceCheck] = []
    blamed: list[Culprit] = []

    def on_piece(number: int, piece: PieceCall, arguments: list[Any]) -> None:
        if blamed:
            return
        check = pieces.check_piece(piece.graph, calls[number].call, arguments, resolved.config.numerics)
        checks.append(check)
        if not check.is_right:
            blamed.append(_culprit(subject, piece, passes, arguments))

    with torch.inference_mode():
        pieces.walk(model, subject.weights, *subject.inputs(ids), subject.attention(Observed()), on_piece)
    if blamed:
        return tuple(checks), len(checks) - 1, blamed[0]
    return tuple(checks), None, _guilty_model_pass(subject, compiled, passes, ids)


def _culprit(
    subject: _Subject, piece: PieceCall, passes: Sequence[Pass], arguments: Sequence[Any]
) -> Culprit:
    resolved = subject.resolved
    factors = resolved.piece_factors()

    def compile_without(fewer: Sequence[Pass]) -> pieces.Call:
        return compile_piece(piece.graph, fewer, resolved.store, resolved.device, factors).call

    folder = resolved.store.build_folder()
    return pieces.find_culprit(
        piece.graph, passes, arguments, resolved.config.numerics, folder, compile_without
    )


def _guilty_model_pass(
    subject: _Subject, compiled: Compiled, passes: Sequence[Pass], ids: Sequence[int]
) -> Culprit | None:
    """The pass over the whole model, if any, without which the model run op by op gives something else."""
    eps = torch.finfo(subject.resolved.dtype).eps

    def run(chosen: Sequence[Pass]) -> Tensor:
        model: SplitModel = split_program(subject.resolved.program(), tuple(chosen))
        attention = subject.attention(Observed())
        with torch.inference_mode():
            return pieces.walk(model, subject.weights, *subject.inputs(ids), attention, lambda *_: None)

    taken = [report["name"] for report in compiled.plan.reports if report["num_matches"]]
    suspects = [step for step in passes if step.name in taken]
    plain = run([]) if suspects else None  # a run traces the whole model
    for step in suspects:
        assert plain is not None
        error = error_of(run([step]), plain)
        if error.rms > pieces.RMS_FLOOR * eps * len(ids):
            return Culprit(name=step.name, is_pass=True, error=error)
    return None


def _layers(
    ours: Sequence[Observed], eager: Sequence[Observed], theirs: Sequence[Observed] | None, dtype: torch.dtype
) -> tuple[LayerErrors, ...]:
    """The worst of all prompts for each layer, the logits last."""
    rows = []
    for layer in [*range(len(ours[0].layers)), -1]:
        candidates = [
            _layer_errors(layer, run, plain, theirs[index] if theirs else None, dtype)
            for index, (run, plain) in enumerate(zip(ours, eager, strict=True))
        ]
        rows.append(max(candidates, key=lambda row: (not row.is_right, row.compiled_to_eager.rms)))
    return tuple(rows)


def _layer_errors(
    layer: int, run: Observed, plain: Observed, right: Observed | None, dtype: torch.dtype
) -> LayerErrors:
    def tensors(observed: Observed) -> tuple[Tensor, ...]:
        return observed.layers[layer] if layer >= 0 else (observed.logits,)

    def worst(left: Observed, other: Observed) -> Error:
        pairs = zip(tensors(left), tensors(other), strict=True)
        return max((error_of(a.cpu(), b.cpu()) for a, b in pairs), key=lambda error: error.rms)

    to_eager = worst(run, plain)
    if right is None:
        return LayerErrors(layer=layer, compiled_to_eager=to_eager, compiled=None, eager=None, is_right=True)
    compiled, eager = worst(run, right), worst(plain, right)
    return LayerErrors(
        layer=layer,
        compiled_to_eager=to_eager,
        compiled=compiled,
        eager=eager,
        is_right=compiled.is_explained_by(eager, torch.finfo(dtype).eps, SLACK),
    )


def _differences(
    ours: Sequence[Observed], eager: Sequence[Observed], theirs: Sequence[Observed] | None
) -> Iterator[Difference]:
    for prompt, (run, plain) in enumerate(zip(ours, eager, strict=True)):
        reference = theirs[prompt] if theirs else plain
        best = reference.logits.topk(2).values.cpu()
        chosen = [observed.logits.argmax(-1).cpu().tolist() for observed in (run, plain, reference)]
        for position, tokens in enumerate(zip(*chosen, strict=True)):
            if len(set(tokens)) > 1:
                yield Difference(
                    prompt=prompt,
                    position=position,
                    compiled=tokens[0],
                    eager=tokens[1],
                    transformers=tokens[2] if theirs else None,
                    margin=float(best[position, 0] - best[position, 1]),
                )
