"""Runs one scheduled step on the device: the forward, the logits of the last rows, the sampler."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...common.errors import LaminaError
from ...compiler.execution.cpu_call_graph import CpuCallGraphs
from ...compiler.execution.cuda_graphs import CudaGraphs
from ..protocol.runner_output import RunnerOutput
from ..protocol.scheduler_output import ON_HOST, Constrained, Ints, SchedulerOutput, no_requests
from ..sampling_params import LogitsProcessor
from .attention import PagedAttention
from .broken_logits import failed_prompts, failed_samples
from .grammar_masks import GrammarMasks, NewMatcher
from .graph_runner import Decode, Forward, GraphRunner, Mixed
from .host_blocks import HostBlocks
from .input_batch import BatchView, InputBatch
from .logits_adjuster import Adjuster
from .logprobs import LogprobsTensors, prompt_logprobs, sample_logprobs
from .sampler import rows_of, sample

Logits = Callable[[Tensor], Tensor]  # hidden [n, H] -> [n, vocab]
OnLogits = Callable[[SchedulerOutput, Tensor], None]  # a step, and logits [its samples or more, vocab]


class LaunchedStep:
    """A step that was launched; its tokens are read when they are needed."""

    def __init__(
        self,
        plan: SchedulerOutput,
        sampled: Tensor,
        logprobs: LogprobsTensors | None,
        arrived: torch.cuda.Event | None,
        failures: Mapping[str, LaminaError],
        grammars: GrammarMasks,
    ) -> None:
        self._plan = plan
        self._grammars = grammars
        self._sampled = sampled
        self._logprobs = logprobs
        self._arrived = arrived
        self._failures = failures

    def token_ids(self) -> NDArray[np.int32]:
        """Its samples, waiting for the device where it is still at work."""
        if self._arrived is not None:
            self._arrived.synchronize()
        token_ids: NDArray[np.int32] = self._sampled.numpy()
        return token_ids

    def read(self) -> RunnerOutput:
        """What the step came to, waiting for the device where it is still at work.

        A token of a request that failed means nothing.
        """
        token_ids = self.token_ids()
        return RunnerOutput(
            token_ids=token_ids,
            logprobs=None if self._logprobs is None else self._logprobs.read(),
            failures=self._all_failures(token_ids),
            forced=self._forced(token_ids),
        )

    def _forced(self, token_ids: NDArray[np.int32]) -> Mapping[str, tuple[int, ...]]:
        adjusted = self._plan.adjusted
        if adjusted is None or not adjusted.constrained:
            return {}
        which = adjusted.samples[[one.which for one in adjusted.constrained]]
        return self._grammars.forced(adjusted.constrained, token_ids[which].tolist())

    def _all_failures(self, token_ids: NDArray[np.int32]) -> Mapping[str, LaminaError]:
        failures: dict[str, LaminaError] = {**failed_samples(self._plan, token_ids), **self._failures}
        if self._logprobs is not None and self._logprobs.prompts:
            failures |= failed_prompts(self._plan, self._logprobs.prompts[-1])
        return failures


class ModelRunner:
    """Owns the KV tensors through `attention`; everything else of a step lies in the input batch."""

    def __init__(
        self,
        *,
        forward: Forward,
        logits: Logits,
        attention: PagedAttention,
        input_batch: InputBatch,
        num_valid_ids: int,
        cuda_graphs: CudaGraphs | None = None,
        cpu_call_graphs: CpuCallGraphs | None = None,
        host_blocks: HostBlocks | None = None,
        new_matcher: NewMatcher | None = None,
        jump_forward: bool = True,
    ) -> None:
        """new_matcher: what makes matchers of grammars, None where there is no tokenizer.

        jump_forward: whether a step says what grammars force to follow its samples.
        """
        self._logits = logits
        self._attention = attention
        self._input_batch = input_batch
        self._num_valid_ids = num_valid_ids
        self._adjuster = Adjuster(
            num_valid_ids=num_valid_ids,
            device=input_batch.device,
            max_slots=input_batch.max_num_seqs,
            max_tokens=input_batch.max_seq_len,
            grammars=GrammarMasks(new_matcher, jump_forward=jump_forward),
        )
        self._graphs = GraphRunner(
            forward, attention, input_batch, cuda_graphs=cuda_graphs, cpu_call_graphs=cpu_call_graphs
        )
        self.host_blocks = host_blocks
        self.on_logits: OnLogits | None = None  # sees what a step samples from, before it is adjusted
        self._num_without_cuda_graph = 0
        self._logprobs: LogprobsTensors | None = None  # that the last step wants
        self._failures: Mapping[str, LaminaError] = {}  # of requests in the last step
        self._last: LaunchedStep | None = None

    def add_request(
        self, request_id: str, logits_processors: Sequence[LogitsProcessor] = (), grammar: str | None = None
    ) -> None:
        """Know a request's own logits processors and grammar by its id, until remove_request."""
        if logits_processors:
            self._adjuster.processors[request_id] = logits_processors
        if grammar is not None:
            self._adjuster.grammars.add(request_id, grammar)

    def remove_request(self, request_id: str) -> None:
        """Let go of what add_request brought, if anything."""
        self._adjuster.processors.pop(request_id, None)
        self._adjuster.grammars.remove(request_id)

    def close(self) -> None:
        """Give back captures and threads."""
        self.drop_captures()
        self._adjuster.grammars.close()

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> LaunchedStep:
        """Launch one step and return at once with the means to read what it came to.

        Whatever is raised, the next plan must have all block tables anew; all else is sent again by itself.
        """
        try:
            self._logprobs = LogprobsTensors() if plan.wanted_logprobs is not None else None
            self._failures = {}
            if any(plan.copies):
                assert self.host_blocks is not None, "blocks are to be copied to a host without slots"
                self.host_blocks.copy(plan.copies)
            self._launch(plan)
            self._last = self._launched(plan)
            return self._last
        except BaseException:
            self._input_batch.forget()
            self._adjuster.forget()
            raise

    def plan_captures(self, decode_sizes: Sequence[int], mixed_sizes: Sequence[int]) -> int:
        """Note which sizes are to be captured, in requests and in tokens; returns how many are."""
        return self._graphs.plan_captures(decode_sizes, mixed_sizes)

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one size, which steps replay from then on; False where none is left.

        No step may be in flight.
        """
        return self._graphs.capture_next(self._run)

    def drop_captures(self) -> None:
        """Drop every capture and its memory; the sizes are to be captured again."""
        self._graphs.drop()

    def profile(self, num_tokens: int, num_seqs: int) -> None:
        """Run the largest step there can be on padding, to see what memory it takes beside the cache."""
        padding = self._input_batch.write(no_requests(), num_tokens, num_seqs, num_seqs)
        with torch.inference_mode():
            self._run(dataclasses.replace(padding, max_query_len=num_tokens))  # loads prefill's kernels too

    @property
    def num_eager_steps(self) -> int:
        """Steps so far that no capture served."""
        return self._num_without_cuda_graph - self.num_cpu_replays

    @property
    def num_cpu_replays(self) -> int:
        """Steps so far that a CPU call graph served."""
        return self._graphs.num_cpu_replays

    def _launch(self, plan: SchedulerOutput) -> None:
        """Compute the step's logits and leave its samples in the input batch."""
        batch, logits = self._computed(plan)
        if self.on_logits is not None and logits is not None:
            self.on_logits(plan, logits)
        if plan.adjusted is not None:
            assert logits is not None, "samples of a step without any"
            newest = partial(self._newest_tokens, plan, np.cumsum(plan.num_scheduled_tokens))
            self._failures = self._adjuster.choose(plan.adjusted, batch, logits, newest, plan.banned)
        if batch.logprobs is not None and self._logprobs is not None and logits is not None:
            samples = sample_logprobs(batch.logprobs, logits, batch.sampled, self._num_valid_ids)
            self._logprobs = self._logprobs._replace(samples=samples)

    def _newest_tokens(
        self, plan: SchedulerOutput, ends: Ints, one: Constrained, count: int
    ) -> Sequence[int]:
        """The last tokens of a row, so many; waits for the step before where one is its sample."""
        end = int(ends[one.row])
        assert count <= plan.num_scheduled_tokens[one.row], "a grammar has missed tokens"
        tokens: list[int] = plan.token_ids[end - count : end].tolist()
        if plan.sources[one.row] != ON_HOST:
            assert self._last is not None, "a token of a step that never was"
            tokens[-1] = int(self._last.token_ids()[plan.sources[one.row]])
        return tokens

    def _computed(self, plan: SchedulerOutput) -> tuple[BatchView, Tensor | None]:
        """The step in the input batch, and the logits [padded_samples, vocab] of its samples, if any."""
        match self._graphs.size_for(plan):
            case Decode(size) as key:
                batch = self._input_batch.write(plan, size, size, size)
                return batch, self._graphs.replay_decode(key, batch)
            case Mixed(size) as key:
                batch = self._input_batch.write(plan, padded_tokens=size)
                self._begin(batch)
                return batch, self._sample(batch, self._graphs.replay_mixed(key, batch))
        self._num_without_cuda_graph += 1
        batch = self._input_batch.write(plan)
        return batch, self._run(batch)

    def _run(self, batch: BatchView) -> Tensor | None:
        """The step without a CUDA graph, or while it is captured; returns its logits."""
        self._begin(batch)
        return self._sample(batch, self._graphs.forward(batch))

    def _begin(self, batch: BatchView) -> None:
        self._attention.begin(batch)
        self._input_batch.take_token_ids(batch)

    def _sample(self, batch: BatchView, hidden: Tensor) -> Tensor | None:
        """Leave a token a sampling row where the next step finds it; returns the logits, if any."""
        if batch.logprobs is not None:
            prompts = prompt_logprobs(batch.logprobs, hidden, self._logits, self._num_valid_ids)
            self._logprobs = LogprobsTensors(prompts=prompts)
        if not batch.logits_rows.shape[0]:
            return None
        logits = self._logits(hidden.index_select(0, batch.logits_rows))
        sample(logits, rows_of(batch, self._num_valid_ids), batch.sampled)
        return logits

    def _launched(self, plan: SchedulerOutput) -> LaunchedStep:
        """Start the tokens in flight to the host: the next step overwrites where they are."""
        sampled, logprobs = self._input_batch.sampled(plan.num_samples), self._logprobs
        grammars = self._adjuster.grammars
        if sampled.device.type != "cuda":
            return LaunchedStep(plan, sampled.clone(), logprobs, None, self._failures, grammars)
        staged = _copy_to_host(sampled)
        logprobs = logprobs and logprobs.each(_copy_to_host)
        arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return LaunchedStep(plan, staged, logprobs, arrived, self._failures, grammars)


def _copy_to_host(values: Tensor) -> Tensor:
    """A copy in pinned memory, which is there when all that was launched is over."""
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
