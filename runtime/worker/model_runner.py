"""Runs one scheduled step on the device: the forward, the logits of the last rows, the sampler."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...common.errors import UnsupportedError
from ...compiler.execution.cpu_call_graph import CpuCallGraphs
from ...compiler.execution.cuda_graphs import CudaGraphs
from ..protocol.scheduler_output import Constrained, SchedulerOutput, no_requests
from ..sampling_params import LogitsProcessor
from .adapters import Adapted, Adapters
from .attention import PagedAttention
from .deferred_step import Choice, DeferredStep, Step
from .device_memory import DeviceMemory
from .draft_batch import DraftRows
from .drafter import Drafter
from .grammar_masks import Failure, GrammarMasks, NewMatcher
from .graph_runner import Computed, Decode, Forward, GraphRunner, PlannedCaptures
from .host_blocks import HostBlocks
from .input_batch import BatchView, InputBatch
from .launched_step import LaunchedStep
from .logits_adjuster import Adjuster, BegunChoice
from .logprobs import LogprobsTensors, prompt_logprobs, sample_logprobs
from .model_weights import ModelWeights
from .pooler import Pooler
from .sampler import Logits, choose, sampled_rows
from .speculator import Speculator
from .stage_link import EarlierStageFailedError, StageLink
from .step_results import StepResults
from .vocabulary_part import VocabularyPart

OnLogits = Callable[[SchedulerOutput, Tensor], None]  # a step, and logits [its samples or more, vocab]


class ModelRunner:
    """Owns the KV tensors through `attention`; everything else of a step lies in the input batch."""

    def __init__(
        self,
        *,
        forward: Forward,
        logits: Logits | None,
        vocabulary_part: VocabularyPart | None = None,
        attention: PagedAttention,
        input_batch: InputBatch,
        num_valid_ids: int,
        cuda_graphs: CudaGraphs | None = None,
        cpu_call_graphs: CpuCallGraphs | None = None,
        host_blocks: HostBlocks | None = None,
        new_matcher: NewMatcher | None = None,
        jump_forward: bool = True,
        num_mask_threads: int = 0,
        drafter: Drafter | None = None,
        memory: DeviceMemory | None = None,
        pooler: Pooler | None = None,
        adapted: Adapted | None = None,
        stage_link: StageLink | None = None,
    ) -> None:
        """logits: None of a model that makes no tokens. vocabulary_part: what chooses without them, where
        ranks share the vocabulary out. new_matcher: what makes matchers of grammars, None where there is no
        tokenizer. jump_forward: whether a step says what grammars force after its samples. num_mask_threads:
        as GrammarMasks has it. drafter: of as many drafts as the input batch has room for, None in stages
        that do not sample. memory: what is given back while it sleeps, if it may. pooler: of requests that
        want no tokens. adapted: for steps with adapters, if there may be any. stage_link: to other stages.
        """
        self._memory, self._link, self._pooler = memory, stage_link, pooler
        self._samples = stage_link is None or stage_link.is_last
        self._pooled: Tensor | None = None  # results of the last step
        self._logits, self._part = logits, vocabulary_part
        self._attention, self._input_batch = attention, input_batch
        self._speculator = Speculator(drafter, input_batch) if input_batch.draft_ids.numel() else None
        self._draft_rows: DraftRows | None = None  # of the last step
        self._num_valid_ids = num_valid_ids
        others = vocabulary_part, stage_link, self._speculator
        self._choose = partial(choose, logits, num_valid_ids) if logits and not any(others) else None
        self._adjuster = Adjuster(
            num_valid_ids=num_valid_ids,
            device=input_batch.device,
            max_slots=input_batch.max_num_seqs,
            max_tokens=input_batch.max_seq_len,
            grammars=GrammarMasks(new_matcher, jump_forward=jump_forward, num_threads=num_mask_threads),
        )
        new = partial(GraphRunner, attention=attention, input_batch=input_batch, cuda_graphs=cuda_graphs)
        self._graphs = new(forward, cpu_call_graphs=cpu_call_graphs)
        self._adapters = adapted and adapted.adapters
        self._adapted_graphs = adapted and new(
            adapted.forward, cpu_call_graphs=adapted.cpu_call_graphs, adapts=True
        )
        self.host_blocks = host_blocks
        self.on_logits: OnLogits | None = None  # sees what a step samples from: on all ranks, or on none
        self._num_without_cuda_graph = 0
        self._logprobs: LogprobsTensors | None = None  # that the last step wants
        self._failures: Mapping[str, Failure] = {}  # of requests in the last step
        self._constrained: tuple[Constrained, ...] = ()  # its samples with a grammar, where they stood
        self._last: Step | None = None

    def add_request(
        self,
        request_id: str,
        logits_processors: Sequence[LogitsProcessor] = (),
        grammar: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Know a request's own logits processors, grammar and adapter by its id, until remove_request."""
        if adapter is not None:
            self._require_adapters().hold(request_id, adapter)
        if logits_processors:
            self._adjuster.processors[request_id] = logits_processors
        if grammar is not None and self._samples:
            self._adjuster.grammars.add(request_id, grammar)

    def remove_request(self, request_id: str) -> None:
        """Let go of what add_request brought, if anything."""
        if self._adapters is not None:
            self._adapters.release(request_id)
        self._adjuster.processors.pop(request_id, None)
        self._adjuster.grammars.remove(request_id)
        if self._pooler is not None:
            self._pooler.forget(request_id)

    def load_adapter(self, path: str) -> dict[str, Any]:
        """Read an adapter's folder, for requests to name it by the digest that is returned."""
        return self._require_adapters().load(path)

    def unload_adapter(self, digest: str) -> None:
        """Forget an adapter, once no live request has it."""
        self._require_adapters().unload(digest)

    def _require_adapters(self) -> Adapters:
        if self._adapters is None:
            raise UnsupportedError("there is no room for adapters; start the runtime with lora=LoRAConfig()")
        return self._adapters

    def close(self) -> None:
        """Give back captures and threads."""
        self.drop_captures()
        self._adjuster.grammars.close()

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> Step:
        """Launch one step and return at once with the means to read what it came to.

        The samples of one with constrained rows may be launched later, when it is settled, read, or followed.
        Whatever is raised, the next plan must have all block tables anew; all else is sent again by itself.
        """
        self._settle()
        with self._exchange(plan):
            return self._execute(plan)

    def skip(self, plan: SchedulerOutput) -> None:
        """Let a step pass by, as one that failed here: stages behind hear of it."""
        self._settle()
        with suppress(EarlierStageFailedError), self._exchange(plan):
            pass

    def forget(self) -> None:
        """Take nothing for granted of what the device holds, as after a step that failed."""
        self._input_batch.forget()
        self._adjuster.forget()

    def _settle(self) -> None:
        """Launch what is left of the last step, before what it reads of the input batch is written over."""
        if isinstance(self._last, DeferredStep):
            self._last.settle()

    def _execute(self, plan: SchedulerOutput) -> Step:
        try:
            self._logprobs = LogprobsTensors() if plan.wanted_logprobs is not None else None
            self._failures, self._pooled, self._constrained = {}, None, ()
            if any(plan.copies):
                assert self.host_blocks is not None, "blocks are to be copied to a host without slots"
                self.host_blocks.copy(plan.copies)
            self._last = self._launch(plan)
            return self._last
        except BaseException:
            self.forget()
            raise

    def _exchange(self, plan: SchedulerOutput) -> AbstractContextManager[None]:
        """A step's messages with other stages, as large as its padding."""
        graphs = self._graphs_of(plan.adapters is not None)
        return nullcontext() if self._link is None else self._link.step(graphs.num_padded(plan))

    def plan_captures(self, planned: PlannedCaptures) -> int:
        """Note which sizes are to be captured; returns how many of them first."""
        return sum(graphs.plan_captures(planned) for graphs in self._all_graphs())

    @torch.inference_mode()
    def capture_next(self, *, again: bool = False) -> bool:
        """Capture one size (again: one that was dropped); False for none. No step may be in flight."""
        self._settle()
        runs = self._run_padding, self._pad
        return any(graphs.capture_next(*runs, again=again) for graphs in self._all_graphs())

    def drop_captures(self) -> None:
        """Drop every capture and its memory; the sizes are to be captured again."""
        self._settle()
        for graphs in self._all_graphs():
            graphs.drop()

    def sleep(self, level: int) -> None:
        """Give back the KV cache, its copies on the host, every capture, and the weights as the level says.

        No step may be in flight; the next plan must have all block tables anew. A level that is deeper than
        the one before drops more.
        """
        self.drop_captures()
        if self.host_blocks is not None:
            self.host_blocks.clear()
        self._last = self._logprobs = None
        self._own_memory.give_back(level)

    def wake(self, capture: bool) -> None:
        """Take again what sleep() gave back, with an empty cache; capture: and the captures there were."""
        self._own_memory.take()
        self.forget()
        while capture and self.capture_next(again=True):
            pass

    def has_weights(self) -> bool:
        """Whether the model's weights are anywhere, and whole."""
        return self.own_weights.place != "nowhere"

    @property
    def own_weights(self) -> ModelWeights:
        """The model's weights, without those of what drafts for it."""
        return self._own_memory.weights[0]

    @property
    def _own_memory(self) -> DeviceMemory:
        assert self._memory is not None, "a runner that does not know its weights"
        return self._memory

    def profile(self, num_tokens: int, num_seqs: int) -> None:
        """Run the largest step there can be on padding, to see what memory it takes beside the cache."""
        most = min(self._input_batch.max_num_samples, max(num_tokens, num_seqs))
        num_samples = num_seqs if self._speculator is None else most
        batch = self._input_batch.write(no_requests(), num_tokens, num_seqs, num_samples)
        batch = dataclasses.replace(batch, max_query_len=num_tokens)  # loads prefill's kernels too
        self._pad(batch)
        with torch.inference_mode():
            for adapts in range(len(self._all_graphs())):
                self._run_padding(batch, Decode(num_seqs, adapts=bool(adapts)))

    @property
    def num_eager_steps(self) -> int:
        """Steps so far that no capture served."""
        return self._num_without_cuda_graph - self.num_cpu_replays

    @property
    def num_cpu_replays(self) -> int:
        """Steps so far that a CPU call graph served."""
        return sum(graphs.num_cpu_replays for graphs in self._all_graphs())

    def _all_graphs(self) -> list[GraphRunner]:
        """Of steps without adapters, and of those with any."""
        return [self._graphs, *([] if self._adapted_graphs is None else [self._adapted_graphs])]

    def _graphs_of(self, adapts: bool) -> GraphRunner:
        if not adapts:
            return self._graphs
        assert self._adapted_graphs is not None, "a step with adapters where there is no room for any"
        return self._adapted_graphs

    def _launch(self, plan: SchedulerOutput) -> Step:
        """Compute the step and leave its samples in the input batch, at once or once it is settled."""
        batch, (hidden, logits) = self._computed(plan)
        if self._link is not None:
            self._link.send(hidden)
        if not self._samples:
            return self._launched(plan, batch, None)
        if plan.pooling is not None:
            assert self._pooler is not None, "a model that pools nothing"
            self._pooled = self._pooler.take_in(plan, plan.pooling, self._parts(hidden)[0])
        if self.on_logits is not None and logits is not None:
            self.on_logits(plan, logits)
        if plan.adjusted is None:
            return self._launched(plan, batch, logits)
        assert logits is not None, "samples of a step without any"
        choice = Choice(self._adjuster, plan, plan.adjusted, self._last)
        self._constrained = choice.constrained
        finish = partial(self._finish_choice, plan, batch, hidden, logits)
        if choice.waits_for_masks_alone and self._speculator is None and self._link is None:
            return DeferredStep(self._last, choice.begin, finish)
        return finish(choice.begin())

    @torch.inference_mode()
    def _finish_choice(
        self, plan: SchedulerOutput, batch: BatchView, hidden: Tensor, logits: Tensor, begun: BegunChoice
    ) -> LaunchedStep:
        """Choose adjusted samples anew, and judge drafts by them."""
        try:
            self._failures = self._adjuster.finish(begun, batch, logits, plan.banned)
            self._judge(batch, hidden, plan.request_ids)
            return self._launched(plan, batch, logits)
        except BaseException:
            self.forget()
            raise

    def _computed(self, plan: SchedulerOutput) -> tuple[BatchView, Computed]:
        """The step in the input batch, and what it computed."""
        graphs = self._graphs_of(plan.adapters is not None)
        is_greedy = self._chooses_by_parts(plan.is_greedy)
        graphs.capture_if_due(plan, self._run_padding, self._pad, is_greedy=is_greedy)
        key = graphs.size_for(plan, is_greedy=is_greedy)
        if isinstance(key, Decode):
            batch = self._write(plan, key.size * key.query_len, key.size, key.size * key.query_len)
            return batch, graphs.replay_decode(key, batch)
        batch = self._write(plan, *(() if key is None else (key.size,)))
        self._begin(batch)
        self._num_without_cuda_graph += key is None
        rows = graphs.rows_for(plan, batch) if self._samples and self._speculator is None else None
        if key is None and rows is None and (computed := graphs.whole_step(batch, self._choose)):
            return batch, computed
        hidden = graphs.replay_mixed(key, batch, rows) if key else graphs.forward(batch, rows)
        return batch, self._sample(batch, hidden, plan.request_ids)

    def _write(self, plan: SchedulerOutput, *padded: int) -> BatchView:
        """The step in the input batch with this padding, and what a speculator is told of it."""
        batch = self._input_batch.write(plan, *padded)
        if plan.adapters is not None:
            self._require_adapters().begin(plan, len(batch.token_ids))
        if self._speculator is not None:
            self._draft_rows = self._speculator.write(plan, batch)
        return batch

    def _pad(self, batch: BatchView) -> None:
        """Say of drafts that a step is padding: what steps of other sizes left there means nothing to it."""
        if self._speculator is not None:
            self._speculator.write(no_requests(), batch)

    def _run_padding(self, batch: BatchView, key: Decode) -> Computed:
        """A step of padding without a CUDA graph, or while it is captured."""
        batch = dataclasses.replace(batch, is_greedy=key.is_greedy)
        if self._speculator is not None:
            drafts, num_next = key.query_len - 1, key.num_next
            self._draft_rows = self._speculator.view(batch, most_drafts=drafts, num_next=num_next)
        self._begin(batch)
        return self._sample(batch, self._graphs_of(key.adapts).forward(batch), ())

    def _begin(self, batch: BatchView) -> None:
        if self._speculator is not None and self._draft_rows is not None:
            self._speculator.begin(batch, self._draft_rows)
        self._attention.begin(batch)
        self._input_batch.take_token_ids(batch)

    def _sample(self, batch: BatchView, computed: Tensor, request_ids: tuple[str, ...]) -> Computed:
        """Leave a token a sampling row where the next step finds it, and judge drafts by it."""
        if not self._samples:
            return Computed(computed, None)
        logits, hidden = None, self._parts(computed)[0]
        if batch.logprobs is not None:
            assert self._logits is not None, "log-probabilities of a model that makes no tokens"
            prompts = prompt_logprobs(batch.logprobs, hidden, self._logits, self._num_valid_ids)
            self._logprobs = LogprobsTensors(prompts=prompts)
        if self._logits is not None and batch.is_drawn and batch.logits_rows.shape[0]:
            if self._part is not None and self._chooses_by_parts(batch.is_greedy):
                self._part.choose(sampled_rows(hidden, batch), batch.banned, batch.sampled)
            else:
                logits = choose(self._logits, self._num_valid_ids, batch, hidden)
        self._judge(batch, computed, request_ids)
        return Computed(computed, logits)

    def _chooses_by_parts(self, is_greedy: bool) -> bool:
        """Whether a step whose samples are greedy, or are not, needs no logits of other ranks."""
        return is_greedy and self._part is not None and self.on_logits is None

    def _parts(self, computed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hidden states [T, H], and the residual sums [T, n * H] beside them that a drafter wants, if any."""
        num_sums = 0 if self._speculator is None else len(self._speculator.wants_aux)
        if not num_sums:
            return computed, None
        width = computed.shape[1] // (1 + num_sums)
        return computed[:, :width], computed[:, width:]

    def _judge(self, batch: BatchView, computed: Tensor, request_ids: tuple[str, ...]) -> None:
        """Judge a step's drafts by its samples and have others proposed, if anybody drafts."""
        if self._speculator is not None and self._draft_rows is not None:
            hidden, sums = self._parts(computed)
            self._speculator.finish(batch, self._draft_rows, hidden, sums, request_ids)

    def _launched(self, plan: SchedulerOutput, batch: BatchView, logits: Tensor | None) -> LaunchedStep:
        """Start what a step came to in flight to the host: the next step overwrites where it is."""
        if batch.logprobs is not None and self._logprobs is not None and logits is not None:
            samples = sample_logprobs(batch.logprobs, logits, batch.sampled, self._num_valid_ids)
            self._logprobs = self._logprobs._replace(samples=samples)
        speculator = self._speculator if self._samples else None
        verdict = speculator.verdict(plan.num_rows) if speculator else None
        left = speculator.left(plan.num_rows) if speculator and (self._constrained or self._link) else None
        failure = None if self._link is None else self._link.failure()
        sampled = self._input_batch.sampled(plan.num_samples)
        results = StepResults(sampled, verdict, left, self._logprobs, self._pooled, failure)
        return LaunchedStep(plan, results, self._failures, self._adjuster.grammars, self._constrained)
