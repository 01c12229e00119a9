"""Answers with adapters: those of the model that one is merged into, whatever else runs beside them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina import NGram, Runtime, SamplingParams
from lamina.common.errors import RequestError, UnknownAdapterError, UnsupportedError
from lamina.runtime.adapters.config import LoRAConfig
from lamina.runtime.engine.beam_search import BeamSearchParams
from lamina.runtime.engine.engine_core import EngineCore
from lamina.runtime.scheduler.replay import replay
from lamina.runtime.structured_outputs import StructuredOutputs

from ...adapters import write_adapter
from .conftest import GREEDY, PROMPTS, SMALL, Tuned, tokens

NAMES = {None: None, 0: "a0", 1: "a1", 2: "a2"}


def core_of(runtime: Runtime) -> EngineCore:
    return runtime._open.core


def asked_together(runtime: Runtime, which: list[int | None], params: SamplingParams = GREEDY) -> list[Any]:
    """Answers to the prompts in turn, each with its adapter, all of them computed in the same steps."""
    answers = []
    for place, adapter in enumerate(which):
        prompt = PROMPTS[place % len(PROMPTS)]
        options = runtime._options({} if adapter is None else {"adapter": NAMES[adapter]})
        answers += runtime._open_input.prepare_each([prompt], params, options)
    runtime._client.run([one for answer in answers for one in answer.submissions])
    return [answer.output() for answer in answers]


def wanted(tuned: Tuned, which: list[int | None]) -> list[tuple[int, ...]]:
    return [tuned.answers[adapter][place % len(PROMPTS)] for place, adapter in enumerate(which)]


@pytest.mark.parametrize("adapter", [None, 0, 1, 2])
def test_an_adapters_answers_are_those_of_the_model_it_is_merged_into(
    adapter: int | None, runtime: Runtime, tuned: Tuned
) -> None:
    found = tokens(runtime.generate(PROMPTS, GREEDY, adapter=NAMES[adapter]))
    assert found == tuned.answers[adapter]


def test_logits_are_those_of_merged_weights_within_rounding(runtime: Runtime, tuned: Tuned) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=8, prompt_logprobs=8)
    for number in range(2):
        (ours,) = runtime.generate([PROMPTS[1]], params, adapter=f"a{number}")
        with Runtime.from_pretrained(tuned.merged[number], **SMALL) as merged:
            (theirs,) = merged.generate([PROMPTS[1]], params)
        for one, other in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
            assert one.keys() == other.keys()
            for id_ in one:
                assert one[id_].logprob == pytest.approx(other[id_].logprob, abs=2e-4)


def test_many_adapters_and_none_are_mixed_in_the_same_steps(tuned: Tuned) -> None:
    which = [None, 0, 1, 2, 2, None, 0, 1, 1]
    with tuned.runtime(lora=LoRAConfig(max_loras=3, max_lora_rank=8)) as runtime:
        assert tokens(asked_together(runtime, which)) == wanted(tuned, which)


@given(
    which=st.lists(st.sampled_from([None, 0, 1, 2]), min_size=1, max_size=9), chunk=st.sampled_from([None, 3])
)
def test_alone_and_together_are_equal(which: list[int | None], chunk: int | None, tuned: Tuned) -> None:
    """Also with fewer slots than adapters, where some wait for others to end."""
    with tuned.runtime(
        max_num_seqs=4, prefill_chunk=chunk, lora=LoRAConfig(max_loras=1, max_lora_rank=8)
    ) as one:
        assert tokens(asked_together(one, which)) == wanted(tuned, which)


def test_a_step_without_an_adapter_is_todays(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runtime._open.runner
    plans = []
    execute = runner.execute
    monkeypatch.setattr(runner, "execute", lambda plan: plans.append(plan) or execute(plan))
    monkeypatch.setattr(torch.ops.lamina.lora, "default", None, raising=False)
    runtime.generate(PROMPTS, GREEDY)
    assert plans
    assert all(plan.adapters is None for plan in plans)


def test_no_step_has_more_adapters_than_there_are_slots(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tuned.runtime(lora=LoRAConfig(max_loras=2, max_lora_rank=8)) as runtime:
        runner, slots = runtime._open.runner, []
        execute = runner.execute
        monkeypatch.setattr(
            runner,
            "execute",
            lambda plan: slots.append(plan.adapters and {*plan.adapters.slots}) or execute(plan),
        )
        asked_together(runtime, [0, 1, 2, 0, None, 1, 2])
        assert all(one is None or one <= {-1, 0, 1} for one in slots)
        assert {0, 1} in [one and one - {-1} for one in slots]


def test_an_adapter_that_is_in_a_slot_is_not_loaded_again(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one unused longest gives way."""
    runner, loads = runtime._open.runner, []
    execute = runner.execute
    monkeypatch.setattr(
        runner,
        "execute",
        lambda plan: (
            loads.extend(load.slot for load in (plan.adapters.loads if plan.adapters else ()))
            or execute(plan)
        ),
    )
    for name in ("a0", "a1", "a0", "a2", "a0", "a1"):
        runtime.generate([PROMPTS[0]], GREEDY, adapter=name)
    assert loads == [0, 1, 1, 1]


def test_blocks_are_shared_with_the_same_adapter_alone(tuned: Tuned, tmp_path: Path) -> None:
    """By its bytes: under another name it is the same, and what took its name is another."""
    prompt, few = list(range(3, 67)), SamplingParams(temperature=0, max_tokens=1)
    with tuned.runtime() as runtime:

        def hits(**options: Any) -> int:
            (output,) = runtime.generate([prompt], few, **options)
            return output.num_cached_tokens

        assert [hits(), hits(), hits(adapter="a0"), hits(adapter="a1")] == [0, 56, 0, 0]
        digest = runtime.adapters["a0"].digest
        for salt in (digest, f"\0{digest}\0", f"{digest}\0", "\0"):
            assert hits(cache_salt=salt) == 0
        runtime.load_adapter("again", tuned.adapters[0])
        assert [hits(adapter="a0"), hits(adapter="again"), hits(adapter="a0", cache_salt="x")] == [56, 56, 0]
        runtime.unload_adapter("a0")
        runtime.load_adapter("a0", tuned.adapters[2])
        assert hits(adapter="a0") == 0


@pytest.mark.parametrize(
    "settings", [{}, {"speculative": NGram(k=3)}, {"prefix_cache": False, "swap_bytes": 0}]
)
def test_preempted_and_drafted_answers_are_the_same(settings: dict[str, Any], tuned: Tuned) -> None:
    """Drafts are verified with the adapter of their request."""
    which = [0, None, 1, 0, 1, None]
    with tuned.runtime(num_kv_blocks=14, max_num_seqs=6, **settings) as runtime:
        assert tokens(asked_together(runtime, which)) == wanted(tuned, which)


@pytest.mark.parametrize("quantization", ["int8"])
def test_a_quantized_model_is_adapted_too(quantization: str, tuned: Tuned) -> None:
    """Near the merged model, whose sums are those of other weights: far from its own without an adapter."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=260)

    def first(runtime: Runtime, **options: Any) -> torch.Tensor:
        (output,) = runtime.generate([PROMPTS[0]], params, **options)
        top = output.outputs[0].logprobs[0]
        return torch.tensor([top[id_].logprob if id_ in top else -50.0 for id_ in range(260)])

    with tuned.runtime(quantization=quantization) as runtime:
        adapted, plain = first(runtime, adapter="a0"), first(runtime)
    with Runtime.from_pretrained(tuned.merged[0], **SMALL) as merged:
        right = first(merged)
    assert (adapted - right).abs().mean() < 0.2 * (plain - right).abs().mean()


def test_several_answers_beams_forms_and_chats_have_the_adapter(runtime: Runtime, tuned: Tuned) -> None:
    params = SamplingParams(temperature=1.0, n=3, seed=4, max_tokens=6, ignore_eos=True)
    beams = BeamSearchParams(beam_width=2, max_tokens=5)
    form = SamplingParams(
        temperature=0, max_tokens=20, structured_outputs=StructuredOutputs(regex="[a-f]{4,9}")
    )
    messages = [{"role": "user", "content": "hi"}]
    with Runtime.from_pretrained(tuned.merged[0], **SMALL) as merged:
        for asked in (
            lambda one, **given_: one.generate([PROMPTS[0]], params, **given_),
            lambda one, **given_: one.beam_search([PROMPTS[0]], beams, **given_),
            lambda one, **given_: one.generate(["ab"], form, **given_),
            lambda one, **given_: [one.chat(messages, GREEDY, **given_)],
        ):
            ours, theirs = (asked(runtime, adapter="a0"), asked(merged))
            found = [[answer.token_ids for answer in output.outputs] for output in ours]
            assert found == [[answer.token_ids for answer in output.outputs] for output in theirs]
        streamed = runtime.stream(PROMPTS[0], GREEDY, adapter="a0")
        assert tuple(id_ for piece in streamed for id_ in piece.token_ids) == tuned.answers[0][0]


def test_decisions_with_adapters_are_replayed(tuned: Tuned, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with tuned.runtime(record=log, max_num_seqs=4) as runtime:
        asked_together(runtime, [0, 1, 2, None, 0, 2, 1])
        runtime.generate(PROMPTS, GREEDY, adapter="a0")
    result = replay(log)
    assert result.difference is None
    assert result.num_requests == 10
    assert '"adapters"' in log.read_text()


class Traffic:
    """A runtime under random traffic: what is loaded, and what each running request is to answer."""

    def __init__(self, runtime: Runtime, tuned: Tuned) -> None:
        self.runtime, self.tuned = runtime, tuned
        self.running: list[tuple[Iterator[Any], list[int], int | None, int]] = []

    def ask(self, adapter: int | None, prompt: int) -> None:
        name = NAMES[adapter]
        if name is not None and name not in self.runtime.adapters:
            with pytest.raises(UnknownAdapterError, match=f"adapter is '{name}'"):
                self.runtime.generate([PROMPTS[prompt]], GREEDY, adapter=name)
            return
        stream = self.runtime.stream(PROMPTS[prompt], GREEDY, adapter=name)
        first = list(next(stream).token_ids)
        self.running.append((stream, first, adapter, prompt))

    def toggle(self, adapter: int) -> None:
        name = f"a{adapter}"
        if name in self.runtime.adapters:
            self.runtime.unload_adapter(name)
        else:
            self.runtime.load_adapter(name, self.tuned.adapters[adapter])

    def advance(self, which: int) -> None:
        if self.running:
            stream, found, _, _ = self.running[which % len(self.running)]
            found += next(stream, _Nothing).token_ids

    def drop(self, which: int) -> None:
        if self.running:
            self.running.pop(which % len(self.running))[0].close()

    def finish(self) -> None:
        for stream, found, adapter, prompt in self.running:
            found += [id_ for piece in stream for id_ in piece.token_ids]
            assert tuple(found) == self.tuned.answers[adapter][prompt]


class _Nothing:
    token_ids = ()


ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from([None, 0, 1, 2]), st.integers(0, 2)),
    st.tuples(st.just("toggle"), st.integers(0, 2)),
    st.tuples(st.just("advance"), st.integers(0, 9)),
    st.tuples(st.just("drop"), st.integers(0, 9)),
)


@given(actions=st.lists(ACTIONS, min_size=5, max_size=25), slots=st.integers(1, 2))
def test_adapters_come_and_go_while_requests_run(actions: list[Any], slots: int, tuned: Tuned) -> None:
    """A request goes on with what it began with; the host keeps one adapter more than those in use."""
    lora = LoRAConfig(max_loras=slots, max_lora_rank=8, max_held=1)
    with tuned.runtime(lora=lora, max_num_seqs=3) as runtime:
        traffic = Traffic(runtime, tuned)
        for name, *arguments in actions:
            getattr(traffic, name)(*arguments)
            core_of(runtime).scheduler.check()
        traffic.finish()
        assert tokens(runtime.generate(PROMPTS, GREEDY)) == tuned.answers[None]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_step_that_fails_leaves_nothing_wrong_in_the_slots(
    at: int, runtime: Runtime, tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it had loaded or had not: the next one loads all of it again."""
    adapters = runtime._open.runner._adapters
    assert adapters is not None
    load, calls = adapters._load_slot, iter(range(1000))

    def failing(one: Any) -> None:
        if next(calls) == at:
            for tensor in adapters.tensors.values():
                tensor.fill_(-1 if tensor.dtype == torch.int32 else 7)
            raise RuntimeError("a fault of nobody's in particular")
        load(one)

    monkeypatch.setattr(adapters, "_load_slot", failing)
    which = [0, 1, None, 1, 0, 2, 2]
    assert tokens(asked_together(runtime, which)) == wanted(tuned, which)
    assert next(calls) > at


def test_unloading_lets_running_requests_end_and_refuses_later_ones(runtime: Runtime, tuned: Tuned) -> None:
    stream = runtime.stream(PROMPTS[0], GREEDY, adapter="a0")
    found = list(next(stream).token_ids)
    runtime.unload_adapter("a0")
    with pytest.raises(UnknownAdapterError, match=r"adapter is 'a0'; wanted one that is loaded \(a1, a2\)"):
        runtime.generate(PROMPTS, GREEDY, adapter="a0")
    with pytest.raises(UnknownAdapterError):
        runtime.unload_adapter("a0")
    found += [id_ for piece in stream for id_ in piece.token_ids]
    assert tuple(found) == tuned.answers[0][0]
    assert runtime._open.runner._adapters._known.keys() == {one.digest for one in runtime.adapters.values()}


def test_files_that_change_are_told_of_where_they_are_read_again(tuned: Tuned, tmp_path: Path) -> None:
    folder = write_adapter(tuned.base, tmp_path / "mine", seed=9)
    with tuned.runtime(lora=LoRAConfig(max_loras=1, max_lora_rank=8, max_held=1)) as runtime:
        runtime.load_adapter("mine", folder)
        before = tokens(runtime.generate(PROMPTS, GREEDY, adapter="mine"))
        runtime.generate(PROMPTS, GREEDY, adapter="a0")  # which takes its place in the host's memory
        assert tokens(runtime.generate(PROMPTS, GREEDY, adapter="mine")) == before
        runtime.generate(PROMPTS, GREEDY, adapter="a0")
        write_adapter(tuned.base, folder, seed=10)
        with pytest.raises(RequestError, match="has changed since it was loaded; load it again"):
            runtime.generate(PROMPTS, GREEDY, adapter="mine")
        with pytest.raises(RequestError, match="adapter 'mine' is loaded already, from"):
            runtime.load_adapter("mine", folder)
        runtime.unload_adapter("mine")
        runtime.load_adapter("mine", folder)
        assert tokens(runtime.generate(PROMPTS, GREEDY, adapter="mine")) != before
        assert tokens(runtime.generate(PROMPTS, GREEDY)) == tuned.answers[None]


def test_without_room_nothing_is_loaded(tuned: Tuned) -> None:
    with Runtime.from_pretrained(tuned.base, **SMALL) as runtime:
        with pytest.raises(
            UnsupportedError, match=r"no room for adapters; start the runtime with lora=LoRAConfig"
        ):
            runtime.load_adapter("a0", tuned.adapters[0])
        with pytest.raises(UnknownAdapterError, match=r"wanted one that is loaded \(none is\)"):
            runtime.generate(PROMPTS, GREEDY, adapter="a0")


@pytest.mark.parametrize("wrong", [("", "x"), (3, "x"), ("a", ""), ("a", 3), (None, "x")])
def test_what_is_no_name_and_no_path_is_refused(wrong: tuple[Any, Any], runtime: Runtime) -> None:
    with pytest.raises(RequestError, match=r"^(name|path) is"):
        runtime.load_adapter(*wrong)
    with pytest.raises(RequestError, match="adapter is"):
        runtime.generate(PROMPTS, GREEDY, adapter=wrong[1] if wrong[1] == 3 else b"a")  # type: ignore[arg-type]


def test_adapters_are_found_by_installed_packages(
    runtime: Runtime, tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import EntryPoint

    from lamina.runtime.adapters import names

    asked: list[str] = []

    def finder(name: str) -> Path | None:
        asked.append(name)
        return tuned.adapters[1] if name == "tuned" else None

    found = EntryPoint(name="mine", value="somewhere:find", group=names.ENTRY_POINTS)
    monkeypatch.setattr(EntryPoint, "load", lambda self: finder)
    monkeypatch.setattr(names.metadata, "entry_points", lambda group: [found])
    assert tokens(runtime.generate(PROMPTS, GREEDY, adapter="tuned")) == tuned.answers[1]
    assert tokens(runtime.generate(PROMPTS, GREEDY, adapter="tuned")) == tuned.answers[1]
    assert asked == ["tuned"]
    with pytest.raises(UnknownAdapterError):
        runtime.generate(PROMPTS, GREEDY, adapter="unheard")
