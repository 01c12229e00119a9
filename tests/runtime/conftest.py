"""Models to test with: one that hashes what paging shows it, one whose answers are given, and TINY."""

import asyncio
import contextlib
import logging
import random
import time
from collections import deque

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file

from lamina import AsyncRuntime, ClosedError, Runtime
from lamina.custom_ops._shared import registry
from lamina.custom_ops._shared.build import load_thread_pool
from lamina.custom_ops.add_rms_norm_linear import _cpu as add_rms_norm_linear
from lamina.custom_ops.linear import _cpu as linear
from lamina.custom_ops.linear_int8 import _cpu as linear_int8
from lamina.runtime.engine.input_processor import total_tokens
from lamina.runtime.kv_cache.block_pool import BlockPool
from lamina.runtime.kv_cache.manager import KVCacheManager
from lamina.runtime.prompts import check_prompt
from lamina.runtime.protocol.runner_output import RunnerOutput
from lamina.runtime.protocol.scheduler_output import StepLogprobs, TokenLogprobs
from lamina.runtime.sampling_params import SamplingParams, stopping_token_ids
from lamina.runtime.scheduler.config import SchedulerConfig
from lamina.runtime.scheduler.request import Request
from lamina.runtime.scheduler.scheduler import Scheduler
from lamina.runtime.speculation.config import spare_columns
from lamina.runtime.worker.grammar_masks import GrammarMasks
from lamina.runtime.worker.input_batch import NO_SLOT, InputBatch
from lamina.runtime.worker.launched_step import LaunchedStep
from lamina.runtime.worker.speculator import Speculator
from lamina.runtime.worker.step_results import StepResults

from .asking import SMALL
from .asking import assert_idle as assert_served
from .paged_model import VOCAB, PagedModel, hashed, parts
from .tally import CACHE, SCHEDULER, in_words


def pytest_terminal_summary(terminalreporter):
    """How much random programs have seen, where tests of that kind have run."""
    for name, counts in (("scheduler", SCHEDULER), ("cache", CACHE)):
        if counts:
            terminalreporter.section(name)
            terminalreporter.write_line(in_words(counts))


@pytest.fixture(scope="module")
def other_folder(make_tiny_folder):
    """A checkpoint of the same model with other weights."""
    return make_tiny_folder(seed=1)


@pytest.fixture(scope="module")
def other(other_folder):
    """Its tensors by their names."""
    return load_file(other_folder / "model.safetensors")


@pytest.fixture(scope="module", autouse=True)
def _build_once(build_once):
    """For all of these tests."""


@pytest.fixture(scope="session")
def forget_kernels():
    """forget_kernels() -> what this process has chosen and loaded for each op is chosen and loaded anew."""

    def forget():
        for known in (registry._select_auto, registry._load, registry._implementation):
            known.cache_clear()
        for calls in registry._found:
            calls.clear()
        for kernel in (linear, linear_int8, add_rms_norm_linear):
            kernel.find_kernel.cache_clear()
        load_thread_pool.cache_clear()

    return forget


class ScriptedDrafter:
    """Drafts that a script makes of the tokens that come next."""

    wants_aux = ()

    def __init__(self, server, script):
        self.server, self.script, self.lots = server, script, random.Random(0)

    def propose(self, step, draft_ids):
        for row, request_id in enumerate(step.request_ids if step.num_drafts else ()):
            if step.is_sampling[row]:
                first = int(step.num_computed[row]) + 1
                right = self.server.whole(self.server.requests[request_id])[first : first + step.num_drafts]
                drafts = self.script([*right, *[0] * (step.num_drafts - len(right))], self.lots)
                draft_ids[row, : len(drafts)] = torch.tensor(drafts, dtype=torch.int32)


def input_batch_of(config, blocks, block_size, num_groups):
    """What a server with these limits writes its steps into."""
    return InputBatch(
        max_num_seqs=config.max_num_seqs,
        max_num_tokens=config.max_num_batched_tokens,
        max_blocks_per_seq=blocks + spare_columns(config.max_drafts, block_size),
        block_size=block_size,
        vocab_size=VOCAB,
        device=torch.device("cpu"),
        num_groups=num_groups,
        max_drafts=config.max_drafts,
        max_num_samples=config.most_samples,
    )


class Server:
    """Everything an engine has but the engine."""

    parts = staticmethod(parts)

    def __init__(
        self,
        *,
        blocks,
        block_size=4,
        seqs=4,
        budget=64,
        beside_decode=None,
        context=128,
        chunk=None,
        prefill=None,
        eos=(),
        next_token=hashed,
        depth=1,
        batches=1,
        prefix_cache=False,
        window=None,
        further_windows=(),  # of further KV-cache groups
        swap=0,
        forced=0,  # the most tokens that are said to follow a sample for certain
        drafts=0,  # tokens that are drafted of each row
        script=lambda right, lots: right,  # (the right tokens, lots) -> what is drafted in their place
        token_cost=0.0,
        clock=time.monotonic,
    ):
        self.forced, self.lots = forced, random.Random(forced)
        self.wholes = {}  # all tokens that a request gets, once something is forced of it
        self.newest = {}  # by step and request the place of the last token that it yields
        self.depth, self.pending = depth, deque()  # steps launched before the oldest is read
        self.written = deque()  # the blocks that each pending step writes
        windows = (window, *further_windows)
        self.pool = BlockPool(blocks * len(windows) + 1)  # one is the null block
        self.kv_cache = KVCacheManager(
            self.pool, block_size, prefix_cache=prefix_cache, windows=windows, swap_slots=swap
        )
        self.config = SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=context,
            max_tokens_beside_decode=beside_decode,
            prefill_chunk=chunk,
            max_prefill_tokens=prefill,
            max_drafts=drafts,
            max_num_samples=seqs * (1 + drafts),
            token_cost=token_cost,
            num_batches=batches,
        )
        self.scheduler = Scheduler(self.config, self.kv_cache, clock=clock)
        self.input_batch = input_batch_of(self.config, blocks, block_size, len(windows))
        self.drafter = ScriptedDrafter(self, script)
        self.speculator = Speculator(self.drafter, self.input_batch) if drafts else None
        self.eos = eos
        self.model = PagedModel(block_size, next_token, windows)
        self.requests = {}

    def add(self, name, length, seed=0, options=None, **params):
        """Queue a request with that many tokens, or the first ones of what is random for the same seed."""
        prompt = check_prompt(
            random.Random(seed).choices(range(VOCAB), k=length) if isinstance(length, int) else length,
            vocab_size=VOCAB,
            max_model_len=self.config.max_model_len,
            capacity_tokens=self.kv_cache.capacity_tokens,
        )
        params = SamplingParams(**params).resolve(None, seed=0)
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            params=params,
            stop_token_ids=stopping_token_ids(params, self.eos),
            max_total_tokens=total_tokens(len(prompt), params, self.config.max_model_len),
            **(options or {}),
        )
        self.scheduler.add(request)
        self.requests[name] = request
        return request

    def launch(self):
        """Schedule and run a step, whose tokens stay unread; the plan, or None."""
        plan = self.scheduler.schedule()
        self.scheduler.check()
        if plan is not None:
            view = self.input_batch.write(plan, self.config.max_num_batched_tokens, self.config.max_num_seqs)
            draft_rows = self.speculator and self.speculator.write(plan, view)
            if draft_rows:
                self.speculator.begin(view, draft_rows)
            self.input_batch.take_token_ids(view)
            self.model.copy(plan.copies)
            sampled = self.model.run(view, plan.adjusted, has_drafts=bool(draft_rows))
            self.input_batch.sampled(len(sampled)).copy_(torch.tensor(sampled, dtype=torch.int32))
            slots = view.slot_mappings[0][: plan.num_tokens]
            slots = slots[slots != NO_SLOT]  # of drafts that may have no block
            output = RunnerOutput(token_ids=np.array(sampled, np.int32))
            ends = (plan.num_computed_tokens + plan.num_scheduled_tokens).tolist()
            if draft_rows:
                self.speculator.finish(view, draft_rows, torch.zeros(0), (), plan.request_ids)
                output = self.verdict(plan, sampled)
                ends = self.speculator.left(plan.num_rows)[:, 0].tolist()
            self.newest[plan.step] = dict(zip(plan.request_ids, ends, strict=True))
            output = structs.replace(output, forced=self.followers(plan))
            self.pending.append((plan, output))
            self.written.append(set((slots // self.kv_cache.block_size).tolist()))
        return plan

    def verdict(self, plan, sampled):
        """What a runner gives of a step with drafts: log-probabilities are of every sample."""
        left = self.speculator.left(plan.num_rows) if self.config.num_batches > 1 else None
        results = StepResults(torch.tensor(sampled).int(), self.speculator.verdict(plan.num_rows), left)
        wanted = [] if plan.wanted_logprobs is None else plan.wanted_logprobs.samples.tolist()
        found = tuple(TokenLogprobs((sampled[n],), (0.0,), 1) for n in wanted)
        output = LaunchedStep(plan, results, {}, GrammarMasks(None)).read()
        return structs.replace(output, logprobs=StepLogprobs(samples=found, prompts=()))

    def whole(self, request):
        """The prompt and the answer of a request, as it is without others."""
        if request.request_id not in self.wholes:
            self.wholes[request.request_id] = [*request.prompt_token_ids, *self.alone(request)[0]]
        return self.wholes[request.request_id]

    def followers(self, plan):
        """Of some that are sampled the tokens that come next, right ones and, after the end, any."""
        found = {}
        for part in self.parts(plan) if self.forced else ():
            request, own = self.requests[part.request_id], self.newest[plan.step]
            if part.samples and request.params.logprobs is None and self.lots.random() < 0.5:
                tokens, first = [*self.whole(request), *range(self.forced)], own[part.request_id] + 1
                found[part.request_id] = tuple(tokens[first : first + self.lots.randint(1, self.forced)])
        return found

    def land(self):
        """Read the oldest step's tokens; who got one."""
        self.written.popleft()
        received = self.scheduler.update(*self.pending.popleft())
        self.scheduler.check()
        return received

    def fail(self, number=0):
        """A step in flight fails, and so do those after it."""
        plan = self.pending[number][0]
        while len(self.pending) > number:
            self.model.spoil(self.pending.pop()[0].copies)
            self.written.pop()
        self.scheduler.discard(plan)
        self.input_batch.forget()
        self.scheduler.check()

    def step(self):
        """What an engine does."""
        plan = self.launch()
        if self.pending and (plan is None or len(self.pending) >= self.depth):
            self.land()
        return plan

    def drain(self, limit=5000):
        """Step until nothing is left; the plans."""
        plans = []
        while self.scheduler.has_work:
            plans.append(self.step())
            assert len(plans) < limit, "nothing ends"
        while self.pending:
            self.land()
        assert self.pool.num_used == 0
        assert self.kv_cache.swap is None or self.kv_cache.swap.num_used == 0
        return [plan for plan in plans if plan is not None]

    def alone(self, request):
        """The tokens this request gets where nobody else exists and nothing is ever short but the context."""
        capacity = self.kv_cache.capacity_tokens
        limit = min(
            total_tokens(len(request.prompt_token_ids), request.params, self.config.max_model_len),
            capacity + 1,
        )
        output, stops, least = [], request.stop_token_ids, request.params.min_tokens
        while True:
            prefix = (*request.prompt_token_ids, *output)
            seen = self.model.visible(prefix)
            output.append(self.model.next_token(seen, stops if len(output) < least else ()))
            if len(output) > least and output[-1] in stops:
                return output, "stop"
            if len(prefix) + 1 >= limit:
                return output, "length"


@pytest.fixture(scope="session")
def make_server():
    """make_server(blocks=..., ...) -> everything an engine has but the engine, with the hashing model."""
    return Server


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """TINY gains nothing from threads, and on a busy machine they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def open_runtime(tiny_folder):
    """open_runtime(folder=TINY, **settings) -> eager Runtime; the test must leave nothing running in it."""
    opened = []

    def make(folder=tiny_folder, **settings):
        opened.append(Runtime.from_pretrained(folder, **{"compile": False} | settings))
        return opened[-1]

    yield make
    for runtime in opened:
        with contextlib.suppress(ClosedError):
            assert_idle(runtime)
        runtime.close()


def assert_idle(runtime):
    """No request is live and nobody holds a block."""
    stats = runtime.stats()
    blocks = stats["blocks"]
    assert blocks["free"] + blocks["cached"] == blocks["total"], blocks
    assert blocks["used"] == 0, blocks
    assert stats["requests"]["running"] == stats["requests"]["waiting"] == 0, stats["requests"]


@pytest.fixture(scope="session")
def is_idle():
    """is_idle(runtime) asserts that no request is live and nobody holds a block."""
    return assert_idle


@pytest.fixture
def said(caplog):
    """said() -> what Lamina has logged in this test, from INFO up."""
    caplog.set_level(logging.INFO, logger="lamina")
    return lambda: caplog.messages


@pytest.fixture
def scripted(scripted_folder, open_runtime):
    """scripted(tokens or logits, files={name: JSON}, **settings) -> Runtime whose answers are given."""

    def make(script, *, files=None, **settings):
        return open_runtime(scripted_folder(script, files), **settings)

    return make


@pytest.fixture
def worded(bbpe_tokenizer):
    """worded(*texts) -> the byte-level tokenizer with these texts as tokens, and their ids."""

    def make(*texts):
        tokenizer = bbpe_tokenizer()
        tokenizer.add_tokens(list(texts))
        return tokenizer, tokenizer.convert_tokens_to_ids(list(texts))

    return make


@pytest.fixture(scope="module")
def shared(tiny_text_folder):
    """One AsyncRuntime for event loops that come and go."""
    runtime = asyncio.run(AsyncRuntime.from_pretrained(tiny_text_folder, **SMALL))
    yield runtime
    asyncio.run(runtime.close())


@pytest.fixture
def serve(shared):
    """serve(coroutine function) -> what it returns for the shared AsyncRuntime, which it must leave idle."""

    def run(body):
        async def main():
            found = await asyncio.wait_for(body(shared), 240)
            await assert_served(shared)
            return found

        return asyncio.run(main())

    return run
